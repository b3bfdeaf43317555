"""Tests of a run's numbers, from handwritten records."""

import time

import pytest
import run_journals

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import run_numbers


def values(numbers):
  """Returns what is reported, by name and labels."""
  return {
    (row.name, *([label] if row.label else [])): value
    for row in numbers.metrics()
    for label, value in row.cells()
  }


def member(replica, staleness=0, count=1, moved=(0, 0)):
  return {
    "replica": replica,
    "count": count,
    "staleness": staleness,
    "compute": 0.5,
    "age": None,
    "timings": None
    if moved is None
    else {
      "total": 0.5,
      "compiled": 0.0,
      "encoded": 0.0,
      "bytes_in": moved[0],
      "bytes_out": moved[1],
    },
  }


def commit(step, time, *members):
  return {"kind": "commit", "step": step, "time": time, "members": members}


def test_the_numbers_of_a_small_run_are_those_of_its_records():
  numbers = run_numbers.RunNumbers()
  numbers.update(
    [
      {"kind": "run", "time": 0.0, "step": 10},
      {"kind": "coordinator", "time": 0.0, "epoch": 0, "step": 10},
      *({"kind": "join", "time": 0.1, "replica": i} for i in range(3)),
      commit(10, 1.0, member(0, moved=(3, 4)), member(1, staleness=3, count=2)),
      {
        "kind": "drop",
        "time": 1.5,
        "reason": "stale",
        **member(2, moved=(0, 4)),
      },
      {"kind": "stall", "time": 2.0, "waited": 1.0},
      {"kind": "stall", "time": 3.0, "waited": 2.0},
      {"kind": "lost", "time": 3.5, "replica": 0},
      {"kind": "abandon", "time": 3.5},
      {"kind": "coordinator", "time": 3.5, "epoch": 1, "step": 11},
    ]
  )
  result = values(numbers)
  assert 2.5 <= result["stalled_seconds",] < 10.0  # It goes on.
  assert result["stalls",] == 1
  assert result["step",] == 11
  assert result["steps",] == 1
  assert result["gradients_applied",] == 3
  assert result["gradients_dropped", "stale"] == 1
  assert result["staleness",].counts[:4] == [1, 0, 0, 2]
  assert result["staleness",].total == 6
  assert result["moved_bytes", "in"] == 3
  assert result["moved_bytes", "out"] == 8
  assert result["members",] == 2
  assert result["membership_changes", "joined"] == 3
  assert result["membership_changes", "lost"] == 1
  assert result["rounds_abandoned",] == 1
  assert result["coordinator_restarts",] == 1
  numbers.update([commit(11, 4.0, member(1, moved=None), member(2))])
  result = values(numbers)
  assert result["steps",] == 2
  assert result["step_seconds",].count == 1
  assert result["step_seconds",].total == 3.0
  assert result["stalled_seconds",] == 0
  assert result["gradients_applied",] == 5
  numbers.update([{"kind": "finish", "time": 5.0}])
  assert values(numbers)["members",] == 0
  useful = values(numbers)["replica_seconds", "useful"]
  assert 0 < values(numbers)["goodput_ratio",] < 1
  assert useful > 0
  # A resumed run counts from its own start.
  numbers.update([{"kind": "run", "time": 0.0, "step": 5}])
  result = values(numbers)
  assert (result["step",], result["steps",]) == (5, 0)
  assert result["replica_seconds", "useful"] == 0


def test_replica_that_joined_before_the_first_record_is_known_by_its_gradients():
  """As for a journal that begins in mid-run."""
  numbers = run_numbers.RunNumbers()
  numbers.update([{"kind": "lost", "time": 0.5, "replica": 0}])
  numbers.update([commit(40, 1.0, member(0), member(1), member(2))])
  assert values(numbers)["members",] == 2


def _record(kind, at, **fields):
  return {"kind": kind, "time": at, **fields}


def _commit(step, at, *members):
  return _record("commit", at, step=step, round=1, members=list(members))


def test_numbers_are_counted_by_replica(tmp_path):
  path = run_journals.ended(tmp_path / "run.jsonl")
  numbers = run_journals.numbers_of(*journal.read(path).records)
  assert numbers.step == 4
  assert numbers.rate() == pytest.approx(1.0)
  assert [numbers.replicas[i].accepted for i in range(3)] == [4, 4, 0]
  assert numbers.replicas[2].dropped == {"stale": 4}
  assert [numbers.replicas[i].state for i in range(3)] == ["in", "lost", "in"]
  assert numbers.replicas[0].wait == pytest.approx(0.2)
  assert numbers.now() == 6.0
  assert numbers.trouble() == ""
  # A resumed run starts over.
  numbers.update([{"kind": "run", "time": 0.0, "step": 2, "unix_time": None}])
  assert (numbers.step, numbers.replicas) == (2, {})


def test_trouble_names_the_missing_replica(tmp_path, monkeypatch):
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written)
    for step in range(3):
      run_journals.commit(written, step, 0, 1, 2, at=1.0 + step)
    numbers = run_numbers.RunNumbers()
    numbers.update(journal.read(path).records, age=25.0)
    # No replica is named before the missing ones are known.
    assert numbers.trouble() == "No step for 25.0 s."
    missing = {"computing": [2], "reporting": [], "absent": []}
    written.write("stall", step=3, waited=10.0, missing=missing, time=13.0)
    numbers.update(journal.read(path).records[-1:], age=15.0)
    assert numbers.trouble() == "Waiting for replica 2, for 25.0 s."


def test_dead_job_is_distinguished_from_one_that_waits(monkeypatch):
  """Its launcher was killed: no process records missing replicas any more."""
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  numbers = run_journals.numbers_of(
    {"kind": "run", "time": 0.0, "step": 0, "unix_time": 1000.0},
    *(_record("join", 0.0, replica=i) for i in range(2)),
    *(_commit(i, 0.1 * i, member(0), member(1)) for i in range(20)),
  )
  monkeypatch.setattr(time, "monotonic", lambda: 1077.0)
  result = values(numbers)
  assert result["commit_age_seconds",] == pytest.approx(77.0)
  assert result["journal_age_seconds",] == pytest.approx(77.0)
  assert numbers.trouble().startswith("Nothing was written for 77.0 s")
  # A stall continues without further records.
  stall = _record("stall", 90.0, step=20, waited=13.0, missing={"absent": [1]})
  numbers.update([stall])
  monkeypatch.setattr(time, "monotonic", lambda: 1097.0)
  assert values(numbers)["stalled_seconds",] == pytest.approx(33.0)
  numbers.update([_record("finish", 91.0, reason="x", outcomes={})])
  ages = ("commit_age_seconds", "journal_age_seconds", "stalled_seconds")
  assert [values(numbers)[name,] for name in ages] == [0, 0, 0]


def test_rejoined_replica_is_a_member_and_keeps_its_losses():
  numbers = run_journals.numbers_of(
    _record("join", 0.0, replica="a"),
    _record("lost", 1.0, replica="a"),
    _record("join", 2.0, replica="a"),
    _record("leave", 3.0, replica="a"),
  )
  one = numbers.replicas["a"]
  assert (one.state, one.losses, one.seen) == ("left", 1, 3.0)
  numbers.update([_record("join", 4.0, replica="a")])
  assert one.state == "in"


def test_replica_was_seen_when_its_gradient_arrived():
  """A step that is committed long after says nothing of its members."""
  numbers = run_journals.numbers_of(
    _record("join", 0.0, replica=0),
    _commit(0, 50.0, run_journals.member(0, 0, age=47.0)),
  )
  assert numbers.replicas[0].seen == 3.0
  assert numbers.replicas[0].wait == 47.0
  # Without the time of its arrival it was seen at the commit.
  numbers.update([_commit(1, 60.0, run_journals.member(0, 1, age=None))])
  one = numbers.replicas[0]
  assert (one.seen, one.wait, one.accepted) == (60.0, 47.0, 2)


def test_skipped_samples_are_counted():
  numbers = run_numbers.RunNumbers()
  skips = commit(11, 2.0, member(0)) | {"skipped": [[4, 8], [12, 14]]}
  numbers.update([commit(10, 1.0, member(0)), skips])
  assert values(numbers)["samples_skipped",] == 6


def test_rate_is_of_recent_steps_and_falls_without_steps(monkeypatch):
  records = [
    {"kind": "run", "time": 0.0, "step": 0, "unix_time": 1000.0},
    *(_commit(i, 100.0 + i) for i in range(30)),
    *(_commit(30 + i, 130.0 + i / 10) for i in range(60)),
  ]
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  numbers = run_journals.numbers_of(*records)
  # The last fifty only, of which ten came in a second.
  assert numbers.rate() == pytest.approx(10.0)
  monkeypatch.setattr(time, "monotonic", lambda: 1044.1)
  assert numbers.rate() == pytest.approx(1.0)
  # After the end it no longer falls.
  numbers.update([_record("finish", numbers.times.end, reason="finished")])
  assert numbers.rate() == pytest.approx(10.0)
  assert numbers.now() == numbers.times.end
  assert run_journals.numbers_of(*records[:2]).rate() == 0.0


def test_no_trouble_is_reported_within_the_usual_step_time(monkeypatch):
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  numbers = run_journals.numbers_of(
    {"kind": "run", "time": 0.0, "step": 0, "unix_time": 1000.0},
    _record("join", 0.0, replica=0),
    *(_commit(i, 2.0 * i) for i in range(1, 4)),
  )
  monkeypatch.setattr(time, "monotonic", lambda: 1009.9)
  assert numbers.trouble() == ""
  monkeypatch.setattr(time, "monotonic", lambda: 1010.1)
  assert numbers.trouble() == "No step for 10.1 s."
  # The wall clock, which may jump, is of no matter.
  monkeypatch.setattr(time, "time", lambda: 0.0)
  assert numbers.now() == pytest.approx(16.1)


def test_missing_replicas_are_named_until_the_next_step():
  numbers = run_journals.numbers_of(
    _record("join", 0.0, replica=0),
    _record("cannot_proceed", 5.0, missing=[1, "b"]),
  )
  assert numbers.trouble() == "Waiting for replica 1, b, for 5.0 s."
  numbers.update([_commit(0, 20.0), _record("join", 30.0, replica=1)])
  assert numbers.trouble() == "No step for 10.0 s."


def test_process_of_a_replica_and_its_exit_are_reported():
  process = _record("process", 2.0, replica=1, host="h", pid=7, ended=None)
  numbers = run_journals.numbers_of(_record("join", 1.0, replica=1), process)
  one = numbers.replicas[1]
  assert (one.host, one.pid, one.ended, one.seen) == ("h", 7, "", 1.0)
  numbers.update([process | {"ended": "was ended by SIGKILL"}])
  assert one.ended == "was ended by SIGKILL"
  numbers.update([process | {"pid": 8}])
  assert (one.pid, one.ended) == (8, "")
