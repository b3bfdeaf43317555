"""The journal's records, whatever replicas say of themselves."""

import json

import msgspec
import pytest

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import codec, entries, notes
from optax_dist.coordinator.runtime import records

_SENT = notes.Timings(99.0, 100.0, 0.25, 0.5, 0.125, 0.5, 0.25, 0.125, 40, 41)


def _note(age=None, raw=(), details=None, **part):
  fields = {
    "incarnation": 4,
    "replica": 1,
    "sequence": 0,
    "local_step": 7,
    "staleness": 0,
    "count": 1,
    "weight": 1.0,
  } | part
  details = details or entries.Details("", None, None)
  commit = entries.Committed(
    entries.AttemptId(2, 7, 3, 0),
    (entries.Part(**fields),),
    (),
    None,
    False,
    (details,),
    (),
  )
  return notes.StepCommitted(commit, age, raw)


def _read(note, now=2.0, maker=None):
  """The record of a note, after it was a line of a journal."""
  maker = maker or records.Records({})
  text = json.dumps(maker.make(note, now))
  record, wrong = journal.parse(text.encode())
  assert wrong == ""
  # Nothing is left to fill in.
  assert record == json.loads(text)
  return record


@pytest.mark.parametrize(
  "replica", [0, 'a "quoted" one', "100%d", "%(x)s{}", "é\n", "\\", ""]
)
def test_a_replica_may_be_called_anything(replica):
  (member,) = _read(_note(replica=replica))["members"]
  assert member["replica"] == replica


@pytest.mark.parametrize("weight", [1 / 3, 0.1 + 0.2, 1e-300, 1e300, 1])
def test_a_weight_is_exact(weight):
  """A replay multiplies by it, and compares to the last bit."""
  (member,) = _read(_note(weight=weight))["members"]
  assert member["weight"] == weight


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("", None),
    ("[null]", [None]),
    ('[3,{"a":[1.5,"é"]}]', [3, {"a": [1.5, "é"]}]),
    ("[3", None),
    ("[3] [4]", None),
    ("[NaN]", None),
    ("[-Infinity]", None),
    ("[1e999]", None),
    ("[" * 100_000, None),
    ("[" * 500 + "]" * 500, None),
    ('["' + "]" * 500 + '",' + "[" * 500 + "]" * 501, None),
    ("[" * 50 + "]" * 50, json.loads("[" * 50 + "]" * 50)),
    ("[" * 50 + "{}" + "]" * 50, None),
    ("[" + "[3]," * 99 + "3]", [[3]] * 99 + [3]),
    ("7", None),
    ('{"a": 1}', None),
    ("null", None),
  ],
)
def test_batches_are_a_list_of_json_or_nothing(text, found):
  """They are other processes' texts."""
  assert records.batches(text) == found
  details = entries.Details(text, None, None)
  (member,) = _read(_note(details=details))["members"]
  assert member["batches"] == found


def test_times_are_those_of_the_run_and_never_before_it():
  """An age from before a new leader's own start would be."""
  record = _read(_note(0.5, details=entries.Details("", 0.25, 1.5)))
  assert (record["time"], record["attempt_time"]) == (2.0, 1.5)
  (member,) = record["members"]
  assert (member["compute"], member["arrived"]) == (0.25, 0.5)
  record = _read(_note(3.0, details=entries.Details("", None, 2.5)))
  assert record["attempt_time"] == record["members"][0]["arrived"] == 0.0
  record = _read(_note())
  assert record["attempt_time"] is None
  assert record["members"][0]["arrived"] is None


def test_timings_are_on_the_run_s_clock():
  maker = records.Records({})
  arrived = entries.Details("", None, 0.5)
  (member,) = _read(_note(raw=(_SENT,), details=arrived), 2.0, maker)["members"]
  assert member["timings"] == msgspec.structs.asdict(_SENT) | {
    "start": 0.5,
    "sent": 1.5,
  }
  # The second message has taken longer than the first.
  later = codec.replace(_SENT, sent=101.0)
  slow = _note(raw=(later,), details=arrived)
  (member,) = _read(slow, 5.0, maker)["members"]
  assert member["timings"]["sent"] == 2.5


@pytest.mark.parametrize(
  ("raw", "age"),
  [
    ((), 0.5),  # A commit of the leader before.
    ((None,), 0.5),
    ((_SENT,), None),  # It is not known when it came.
  ],
)
def test_timings_that_mean_nothing_are_left_out(raw, age):
  details = entries.Details("", None, age)
  (member,) = _read(_note(raw=raw, details=details))["members"]
  assert member["timings"] is None


def test_each_member_has_its_own_details():
  """Those of another one would be worse than none."""
  note = _note(raw=(None, None))
  with pytest.raises(ValueError, match="zip"):
    records.Records({}).make(note, 2.0)


def _fields(note, maker=None):
  record = _read(note, 2.0, maker)
  del record["kind"], record["time"]
  return record


def test_only_the_record_of_a_lost_replica_has_a_reason():
  member = {"replica": "a", "incarnation": 3, "step": 7}
  assert _fields(notes.Leave("a", 7, 3)) == member
  lost = notes.Lost("a", 7, 3, "why")
  assert _fields(lost) == member | {"reason": "why"}


def test_a_replica_that_joins_again_has_another_clock():
  maker = records.Records({})
  arrived = entries.Details("", None, 0.0)
  sent = lambda now: _read(_note(raw=(_SENT,), details=arrived), now, maker)[
    "members"
  ][0]["timings"]["sent"]
  assert (sent(2.0), sent(5.0)) == (2.0, 2.0)
  maker.make(notes.Lost(1, 7, 4, "gone"), 5.0)
  assert sent(9.0) == 9.0


def test_a_new_run_has_new_clocks():
  maker = records.Records({"strategy": "s"})
  arrived = entries.Details("", None, 0.0)
  sent = lambda now: _read(_note(raw=(_SENT,), details=arrived), now, maker)[
    "members"
  ][0]["timings"]["sent"]
  assert sent(2.0) == 2.0
  maker.make(notes.RunBegins(0), 0.0)
  assert sent(9.0) == 9.0
