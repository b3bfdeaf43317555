"""Lines of the journal that the coordinator writes."""

import full_disk
import msgspec
import pytest
import run_journals

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries, journal_events
from optax_dist.coordinator.runtime import timings
from optax_dist.coordinator.server import journal_lines


def _commit(step, name="a", weight=1 / 3):
  parts = tuple(
    entries.Part(4, replica, 0, step, 0, 2, weight, data=data)
    for replica, data in ((name, ()), ("b", ((3, 7),)))
  )
  details = (
    entries.Details("[[1,2],null]", 0.123456789, 0.25),
    entries.Details("", None, None),
  )
  commit = entries.Committed(
    entries.RoundId(0, step, 1),
    parts,
    None,
    False,
    details,
    (),
  )
  one = timings.Timings(
    *(1.123456789, 0.25, 0.5, 0.125, 0.5, 1 / 3, 0.125, 40, 41)
  )
  return journal_events.committed(commit, (one, None))


def _begun(tmp_path):
  """A run's journal, and its writer."""
  path = tmp_path / "run.jsonl"
  lines = journal_lines.JournalLines(str(path), {"strategy": "s"})
  lines.write(journal_events.Run(journal_events.VERSION, "", 0))
  return path, lines


def test_journal_line_of_a_step_has_all_details(tmp_path):
  path, lines = _begun(tmp_path)
  lines.write(_commit(0))
  lines.close()
  _, record = run_journals.whole(path)
  assert record["members"][0]["compute"] == 0.123457
  assert record["members"][0]["weight"] == 1 / 3
  assert record["members"][0]["age"] == 0.25
  assert record["members"][0]["batches"] == "[[1,2],null]"
  assert record["members"][0]["timings"]["total"] == 1.123457
  assert record["members"][0]["timings"]["exchanged"] == 0.333333
  assert record["members"][1]["data"] == [[3, 7]]
  assert record["members"][1]["timings"] is None


@pytest.mark.parametrize("weight", [1 / 3, 0.1 + 0.2, 1e-300, 1e300, 1])
def test_a_weight_is_exact(tmp_path, weight):
  """A replay multiplies by it, and compares to the last bit."""
  path, lines = _begun(tmp_path)
  lines.write(_commit(0, weight=weight))
  lines.close()
  assert run_journals.whole(path)[1]["members"][0]["weight"] == weight


def test_new_coordinator_writes_the_steps_that_the_journal_lacks(tmp_path):
  path, first = _begun(tmp_path)
  first.write(_commit(0))
  first.close()  # It is killed before it writes the next one.
  commits = [_commit(step) for step in range(2)]
  second = journal_lines.JournalLines(str(path), {"strategy": "s"}, commits)
  second.close()
  records = run_journals.whole(path)
  assert [r.get("step") for r in records] == [0, 0, 1]


def test_new_coordinator_records_a_gap_for_steps_it_no_longer_has(tmp_path):
  """The log keeps only the latest of the steps that the last one could not write."""
  path, first = _begun(tmp_path)
  first.write(_commit(0))
  first.close()
  commits = [_commit(step) for step in range(70, 72)]
  second = journal_lines.JournalLines(str(path), {"strategy": "s"}, commits)
  second.write(_commit(72))
  second.close()
  last, gap, *rest = run_journals.whole(path)[1:]
  assert (last["step"], gap["kind"], gap["lines"]) == (0, "gap", 69)
  assert [r["step"] for r in rest] == [70, 71, 72]


def _written(path):
  """Returns the steps of all lines, even of lines that a reader skips."""
  result = [journal.parse(x)[0] for x in path.read_bytes().splitlines()]
  return [r["step"] for r in result if r and r["kind"] == "commit"]


def test_coordinator_appends_after_lines_of_another_coordinator(tmp_path):
  path, lines = _begun(tmp_path)
  lines.write(_commit(0))
  with journal.Journal(path) as other:
    other.write("coordinator", step=1, epoch=1)
  lines.write(_commit(1))
  lines.close()
  result = journal.read(path).records
  assert [r["step"] for r in result if r["kind"] == "commit"] == [0, 1]


def test_a_name_that_no_file_can_have_does_not_end_training(caplog):
  lines = journal_lines.JournalLines("a\0b", {"strategy": "s"})
  lines.write(journal_events.Run(journal_events.VERSION, "", 0))
  lines.close()
  assert "training goes on without it" in caplog.text


def test_forged_details_do_not_end_training(tmp_path):
  """It is on the coordinator's event loop that this is written."""
  path, lines = _begun(tmp_path)
  deep = "[" * 320 + "]" * 320
  lines.write(journal_events.Drop(0, 1, 0, 1, "stale", 0, deep))
  strange = r'["\ud800", 1234567890123456789012]'
  lines.write(journal_events.Drop(0, 1, 0, 1, "stale", 0, strange))
  lines.write(journal_events.Stuck(1, 0, "stuck", "in file \udcff.py", 0))
  lines.write(journal_events.Fingerprint(0, 1, "made up", ""))
  lines.write(journal_events.Fingerprint(0, 1, "a", "b-c"))
  lines.close()
  _, dropped, odd, stuck, digest, other = run_journals.whole(path)
  assert dropped["batches"] == deep
  assert journal.batches(odd) == ["\ud800", 1234567890123456789012]
  assert stuck["stacks"] == "in file \udcff.py"
  result = [(r["params"], r["state"]) for r in (digest, other)]
  assert result == [("made up", ""), ("a", "b-c")]


def _full(path):
  """Files may be no longer than this one is."""
  size = path.stat().st_size if path.exists() else 0
  return full_disk.files_end_at(size)


def test_a_run_that_begins_on_a_full_disk_is_in_its_journal(tmp_path, caplog):
  path = tmp_path / "run.jsonl"
  with _full(path):
    lines = journal_lines.JournalLines(str(path), {"strategy": "s"})
    lines.write(journal_events.Run(journal_events.VERSION, "", 0))
    lines.write(_commit(0))
    assert not path.stat().st_size
  lines.write(_commit(1))
  lines.close()
  first, *rest = run_journals.whole(path)
  assert first["kind"] == "run"
  assert first["time"] < 1e-3
  assert [r["step"] for r in rest] == [0, 1]


def test_opening_the_journal_is_retried(tmp_path, caplog):
  path = tmp_path / "later" / "run.jsonl"
  lines = journal_lines.JournalLines(str(path), {"strategy": "s"}, [_commit(3)])
  lines.write(_commit(4))
  assert caplog.text.count("training goes on without it") == 1
  path.parent.mkdir()
  # Meanwhile another coordinator has written the first of these records.
  with journal.Journal(path) as other:
    other.write("run", strategy="s", step=3)
    fields = msgspec.to_builtins(_commit(3))
    other.write(fields.pop("kind"), **fields)
  lines.write(_commit(5))
  lines.close()
  assert _written(path) == [3, 4, 5]


def test_missing_lines_are_counted_in_the_journal_and_the_log(
  tmp_path, caplog, monkeypatch
):
  monkeypatch.setattr(journal_lines, "_MOST_WAITING", 3)
  path, lines = _begun(tmp_path)
  with _full(path):
    for step in range(7):
      lines.write(_commit(step))
  lines.write(_commit(7))
  result = run_journals.whole(path)[1:]
  assert [r.get("step") for r in result] == [5, 6, 7, None]
  assert result[-1]["kind"] == "gap"
  assert result[-1]["lines"] == 5
  assert result[-1]["seconds"] >= 0
  assert "5 lines are missing from it" in caplog.text
  with _full(path):
    lines.write(_commit(8))
    lines.close()
  assert "1 lines are missing from the journal" in caplog.text
