"""The summary of a journal, record by record."""

import time

import pytest
import run_journals

from optax_dist.cli.runs import summary as run_summary
from optax_dist.coordinator import journal, journal_tail


def _record(kind, at, **fields):
  return {"kind": kind, "time": at, **fields}


def _commit(step, at, *members):
  return _record("commit", at, step=step, attempt=1, members=list(members))


def test_it_counts_by_replica(tmp_path):
  path = run_journals.ended(tmp_path / "run.jsonl")
  summary = run_journals.summary_of(*journal.read(path).records)
  assert summary.step == 4
  assert summary.rate() == pytest.approx(1.0)
  assert [summary.replicas[i].accepted for i in range(3)] == [4, 4, 0]
  assert summary.replicas[2].dropped == {"stale": 4}
  assert [summary.replicas[i].state for i in range(3)] == ["in", "lost", "in"]
  assert summary.replicas[0].wait == pytest.approx(0.2)
  assert summary.now() == 6.0
  assert summary.waiting_for() == ""
  # A resumed run starts over.
  summary.update([{"kind": "run", "time": 0.0, "step": 2, "unix_time": None}])
  assert (summary.step, summary.replicas) == (2, {})


def test_who_is_waited_for_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written)
    for step in range(3):
      run_journals.commit(written, step, 0, 1, 2, at=1.0 + step)
    summary = run_summary.RunSummary()
    summary.update(journal.read(path).records, age=55.0)
    assert summary.waiting_for() == "replica 0, 1, 2, for 55.0 s"
    missing = {"computing": [2], "reporting": [], "absent": []}
    written.write("stall", step=3, waited=10.0, missing=missing, time=13.0)
    summary.update(journal.read(path).records[-1:], age=45.0)
    assert summary.waiting_for() == "replica 2, for 55.0 s"


def test_a_step_that_a_new_leader_repeats_counts_once():
  member = run_journals.member(0, 0, arrived=0.5)
  summary = run_journals.summary_of(
    _commit(0, 1.0, member), _commit(1, 2.0, member), _commit(0, 9.0, member)
  )
  assert (summary.step, summary.committed) == (2, 2.0)
  assert summary.replicas[0].accepted == 2
  assert summary.replicas[0].waits == pytest.approx(0.5 + 1.5)


def test_a_replica_that_comes_back_is_in_again_and_keeps_its_losses():
  summary = run_journals.summary_of(
    _record("join", 0.0, replica="a"),
    _record("lost", 1.0, replica="a"),
    _record("join", 2.0, replica="a"),
    _record("leave", 3.0, replica="a"),
  )
  one = summary.replicas["a"]
  assert (one.state, one.losses, one.seen) == ("left", 1, 3.0)
  summary.update([_record("join", 4.0, replica="a")])
  assert one.state == "in"


def test_one_whose_gradient_came_was_seen_then():
  """A step that is committed long after says nothing of its members."""
  summary = run_journals.summary_of(
    _record("join", 0.0, replica=0),
    _commit(0, 50.0, run_journals.member(0, 0, arrived=3.0)),
  )
  assert summary.replicas[0].seen == 3.0
  assert summary.replicas[0].wait == 47.0
  # Without the time of its arrival it was seen at the commit.
  summary.update([_commit(1, 60.0, run_journals.member(0, 1, arrived=None))])
  one = summary.replicas[0]
  assert (one.seen, one.wait, one.accepted) == (60.0, 47.0, 2)


def test_leaders_and_attempts_are_counted():
  summary = run_journals.summary_of(
    _record("leader", 0.0, replica=0),
    _record("abandon", 1.0),
    _record("leader", 2.0, replica=2),
  )
  assert (summary.leader, summary.terms, summary.abandoned) == (2, 2, 1)


def test_the_rate_is_of_the_last_steps_and_falls_while_none_comes(monkeypatch):
  records = [
    {"kind": "run", "time": 0.0, "step": 0, "unix_time": 1000.0},
    *(_commit(i, 100.0 + i) for i in range(30)),
    *(_commit(30 + i, 130.0 + i / 10) for i in range(60)),
  ]
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  summary = run_journals.summary_of(*records)
  # The last fifty only, of which ten came in a second.
  assert summary.rate() == pytest.approx(10.0)
  monkeypatch.setattr(time, "monotonic", lambda: 1044.1)
  assert summary.rate() == pytest.approx(1.0)
  # After the end it no longer falls.
  summary.update([_record("finish", summary.time, reason="finished")])
  assert summary.rate() == pytest.approx(10.0)
  assert summary.now() == summary.time
  assert run_journals.summary_of(*records[:2]).rate() == 0.0


def test_nobody_is_waited_for_as_long_as_steps_usually_take(monkeypatch):
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  summary = run_journals.summary_of(
    {"kind": "run", "time": 0.0, "step": 0, "unix_time": 1000.0},
    _record("join", 0.0, replica=0),
    *(_commit(i, 2.0 * i) for i in range(1, 4)),
  )
  monkeypatch.setattr(time, "monotonic", lambda: 1009.9)
  assert summary.waiting_for() == ""
  monkeypatch.setattr(time, "monotonic", lambda: 1010.1)
  assert summary.waiting_for() == "replica 0, for 10.1 s"
  # The wall clock, which may jump, is of no matter.
  monkeypatch.setattr(time, "time", lambda: 0.0)
  assert summary.now() == pytest.approx(16.1)


def test_whoever_cannot_be_waited_for_is_named_until_the_next_step():
  summary = run_journals.summary_of(
    _record("join", 0.0, replica=0),
    _record("cannot_proceed", 5.0, missing=[1, "b"]),
  )
  assert summary.waiting_for() == "replica 1, b, for 5.0 s"
  summary.update([_commit(0, 20.0), _record("join", 30.0, replica=1)])
  assert summary.waiting_for() == "replica 0, for 10.0 s"


def test_process_of_a_replica_and_its_end_are_known():
  process = _record("process", 2.0, replica=1, host="h", pid=7, ended=None)
  summary = run_journals.summary_of(_record("join", 1.0, replica=1), process)
  one = summary.replicas[1]
  assert (one.host, one.pid, one.ended, one.seen) == ("h", 7, "", 1.0)
  summary.update([process | {"ended": "was ended by SIGKILL"}])
  assert one.ended == "was ended by SIGKILL"
  summary.update([process | {"pid": 8}])
  assert (one.pid, one.ended) == (8, "")


def test_what_is_not_known_is_passed_over():
  summary = run_journals.summary_of(
    _record("of a later version", 4.0, replica=9)
  )
  assert (summary.time, summary.replicas) == (4.0, {})


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_leader_whose_clock_is_off_is_shown_as_any_other(tmp_path, off):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path, unix_clock=lambda: time.time() + off) as written:
    run_journals.begin(written)
    for step in range(3):
      run_journals.commit(written, step, 0, 1, 2, at=1.0 + step)
    summary = run_summary.RunSummary()
    tail = journal_tail.Tail(path)
    summary.update(tail.read(), tail.age)
    assert 3.0 <= summary.now() < 60.0
    # It goes on from there.
    then = summary.now()
    time.sleep(0.01)
    assert then < summary.now() < 60.0
    assert summary.rate() > 0.01
