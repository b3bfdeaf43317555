"""The log in the store: the order of puts, and what is looked at afterwards."""

import itertools

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import log
from optax_dist.coordinator.protocol.entries import (
  Ended,
  Record,
  Removed,
  Trimmed,
)

ENTRIES = [Removed(number, False, "lost") for number in range(4)]
OTHER = Record(1, (Ended(0, "by another leader", "", ()),))
SAID = fx.Log("info", "said")


def _writer(position=5):
  return log.LogWriter(0, position, itertools.count(1).__next__)


def test_what_is_said_waits_for_what_was_decided_before():
  writer, out = _writer(), []
  writer.say(out, SAID)
  assert out == [SAID]
  writer.add(ENTRIES[0])
  writer.say(out, SAID)
  put = writer.flush(0.0)
  writer.say(out, SAID)
  assert out == [SAID]
  done = writer.answered(ins.PutAnswered(put.request, "done"))
  assert done == log.Appended(5, Record(0, (ENTRIES[0],)), (SAID, SAID))
  assert writer.position == 6
  assert not writer.pending


def test_one_put_at_a_time_with_all_that_has_come_up():
  writer = _writer()
  writer.add(ENTRIES[0])
  first = writer.flush(0.0)
  writer.add(ENTRIES[1])
  writer.add(ENTRIES[2])
  assert writer.flush(0.0) is None
  writer.answered(ins.PutAnswered(first.request, "done"))
  second = writer.flush(0.0)
  assert second.key == "log/6"
  assert second.value.entries == (ENTRIES[1], ENTRIES[2])


@pytest.mark.parametrize("answer", ["conflict", "unknown"])
@pytest.mark.parametrize(
  ("found", "expected"),
  [("own", "done"), ("other", "deposed")],
)
def test_after_no_clear_answer_it_reads_what_stands_there(
  answer, found, expected
):
  writer = _writer()
  writer.add(ENTRIES[0])
  put = writer.flush(0.0)
  get = writer.answered(ins.PutAnswered(put.request, answer))
  assert get == fx.Get(2, "log/5")
  value = {"own": put.value, "other": OTHER}[found]
  result = writer.answered(ins.GetAnswered(get.request, True, value))
  if expected == "done":
    assert isinstance(result, log.Appended)
  else:
    assert result is None
    assert writer.deposed


@pytest.mark.parametrize("known", [True, False])
def test_a_record_that_is_not_there_is_put_again_and_no_other_one(known):
  writer = _writer()
  writer.add(ENTRIES[0])
  put = writer.flush(0.0)
  get = writer.answered(ins.PutAnswered(put.request, "unknown"))
  assert writer.answered(ins.GetAnswered(get.request, known, None)) is None
  assert writer.record == put.value
  assert not writer.deposed
  writer.add(ENTRIES[1])
  assert writer.flush(1.0) is None
  again = writer.probe()
  assert (again.key, again.value) == (put.key, put.value)
  # Until that has an answer nothing is asked, and the first one's, late, is of no
  # interest.
  assert writer.probe() is None
  assert writer.answered(ins.PutAnswered(put.request, "done")) is None
  assert writer.answered(ins.PutAnswered(again.request, "done")).position == 5


def test_an_idle_leader_sees_that_another_one_has_written():
  writer = _writer()
  probe = writer.probe()
  assert writer.answered(ins.GetAnswered(probe.request, True, None)) is None
  assert not writer.deposed
  probe = writer.probe()
  writer.answered(ins.GetAnswered(probe.request, True, OTHER))
  assert writer.deposed


def test_a_block_is_marked_before_it_is_deleted_and_terms_stay():
  trimmer = log.Trimmer(4, itertools.count(1).__next__)
  assert trimmer.trim(9, False) == trimmer.trim(4, False) == []
  (put,) = trimmer.trim(8, False)
  assert put == fx.Put(1, "trimmed/0", Trimmed(0))
  assert trimmer.answered(ins.PutAnswered(1, "unknown"), [2]) == []
  # Next time both are marked.
  first, second = trimmer.trim(12, False)
  assert second.key == "trimmed/1"
  assert trimmer.answered(ins.PutAnswered(first.request, "conflict"), [2]) == [
    fx.Delete(("log/0", "log/1", "log/3"))
  ]


def test_a_log_is_trimmed_only_once_a_step_is_committed():
  trimmer = log.Trimmer(4, itertools.count(1).__next__)
  assert trimmer.trim(8, untouched=True) == []
  first, second = trimmer.trim(12, untouched=False)
  assert (first.key, second.key) == ("trimmed/0", "trimmed/1")


def _read(reader, position, store):
  """What the reader finds in this store, and the keys in their order."""
  asked, step = [], reader.read(position)
  while isinstance(step, fx.Get):
    asked.append(step.key)
    answer = ins.GetAnswered(step.request, True, store.get(step.key))
    step = reader.answered(answer)
  return step, asked


RECORDS = {f"log/{p}": Record(0, (ENTRIES[p],)) for p in range(4)}


def test_a_reader_looks_for_the_marker_after_what_it_has_found():
  reader = log.LogReader(8, itertools.count(1).__next__)
  found, asked = _read(reader, 1, RECORDS)
  assert [position for position, _ in found.records] == [1, 2, 3]
  assert found.end
  assert asked == ["log/1", "log/2", "log/3", "log/4", "trimmed/0"]


def test_a_reader_believes_nothing_of_a_trimmed_block():
  reader = log.LogReader(4, itertools.count(1).__next__)
  found, _ = _read(reader, 2, RECORDS | {"trimmed/0": Trimmed(0)})
  assert found == log.FellOff(4)


def test_a_reader_reads_a_block_at_a_time():
  reader = log.LogReader(4, itertools.count(1).__next__)
  store = RECORDS | {"log/4": RECORDS["log/0"]}
  found, asked = _read(reader, 0, store)
  assert [position for position, _ in found.records] == [0, 1, 2, 3]
  assert not found.end
  assert asked[-1] == "trimmed/0"


def test_a_reader_that_gets_no_answer_says_so():
  reader = log.LogReader(4, itertools.count(1).__next__)
  get = reader.read(0)
  unknown = ins.GetAnswered(get.request, False, None)
  assert reader.answered(unknown) == "unknown"
  assert not reader.busy


def test_nothing_is_said_before_what_was_added_meanwhile_is_in_the_log():
  writer, out = _writer(), []
  writer.add(ENTRIES[0])
  put = writer.flush(0.0)
  writer.add(ENTRIES[1])
  writer.say(out, SAID)
  done = writer.answered(ins.PutAnswered(put.request, "done"))
  assert (out, done.effects) == ([], ())


def test_a_reader_may_begin_at_an_earlier_position_again():
  reader = log.LogReader(8, itertools.count(1).__next__)
  _read(reader, 3, RECORDS)
  found, _ = _read(reader, 1, RECORDS)
  assert [position for position, _ in found.records] == [1, 2, 3]


def test_a_request_that_failed_says_nothing_of_the_store_s_distance():
  delay = log.StoreWatch()
  delay.asked([fx.Get(1, "log/0")], 0.0)
  delay.answered(ins.GetAnswered(1, False, None), 0.1)
  assert delay.shortest == 0.0
