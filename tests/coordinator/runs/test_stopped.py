"""Processes that are stopped, as on a suspended host: time asleep costs nothing."""

import json
import pathlib
import signal
import time

import process_runs
import pytest


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
  with process_runs.Machine(tmp_path_factory.mktemp("processes")) as made:
    made.prepare(3)
    yield made


def _is_stopped(member):
  """Whether the kernel has stopped its process."""
  stat = pathlib.Path(f"/proc/{member.process.pid}/stat").read_text()
  return stat.rpartition(")")[2].split()[0] == "T"


def _stop(machine, first, others, seconds):
  """Stops processes for a while, once the first one has stopped by itself."""
  machine.wait(lambda: first.said("struck"), "the stop")
  machine.wait(lambda: _is_stopped(first), "the stop of its process")
  for member in others:
    member.process.signal(signal.SIGSTOP)
  # The others go on only while somebody reads what they say of each step.
  end = time.monotonic() + seconds
  machine.wait(lambda: time.monotonic() > end, "the pause", seconds + 60.0)
  for member in (first, *others):
    member.process.signal(signal.SIGCONT)


@pytest.mark.parametrize(
  ("k", "n"), [pytest.param(4, 2, marks=pytest.mark.nightly), (3, 3)]
)
def test_a_pause_of_all_replicas_removes_none(machine, tmp_path, k, n):
  """Deadlines of a leader that slept passed at once: it removed everybody."""
  run = process_runs.Run(
    machine,
    tmp_path,
    k,
    n,
    lower_on_loss=True,
    leader_timeout=None,
    attempt_timeout=None,
  )
  # The leader in the midst of an attempt, and the others right after it.
  fault = {"phase": "reduce_scatter", "time": 30, "what": "stop"}
  leader, *others = run.start(n, first_alone=True, replica_0={"fault": fault})
  _stop(machine, leader, others, 7.0)
  run.wait_steps(3)
  assert run.live == run.members
  run.finish()
  if k <= n:  # The programs of these tests don't count parts of sums.
    run.check()
  prints = [m.result["prints"] for m in run.members]
  assert len({json.dumps(p, sort_keys=True) for p in prints}) == 1
  assert all(m.result["error"] is None for m in run.members)
  assert not run.records("lost")
  [end] = run.records("finish")
  assert end["reason"] != "all replicas have left"


def test_a_replica_stopped_for_longer_than_its_patience_joins_again(
  machine, tmp_path
):
  """It ended on waking up: it had waited too long by its own clock."""
  run = process_runs.Run(
    machine,
    tmp_path,
    2,
    3,
    timeout=4.0,
    leader_timeout=1.0,
    attempt_timeout=0.5,
  )
  fault = {"phase": "arrived", "time": 5, "what": "stop"}
  *others, stopped = run.start(
    3,
    first_alone=True,
    replica_0={"period": 0.05},  # There is time to be passed.
    replica_1={"period": 0.05},
    replica_2={"fault": fault},
  )
  _stop(machine, stopped, [], 9.0)  # Its patience is 4 + 3 * 1 + 0.5 s.
  run.wait_steps(3, others)
  run.wait_steps(3)
  assert stopped in run.live
  run.finish()
  run.check()
  assert {r["replica"] for r in run.records("lost")} == {2}
  assert stopped.result["stats"]["rejoins"] >= 1
