"""What TensorFlow's SyncReplicasOptimizer failed at, with real processes.

After each test the ledger adds up, all replicas held the same parameters and
optimizer state after each step, no wait passed its deadline, and journal and
data alone give the same numbers again, to the last bit: `Run.check`. Deaths and
stops of replicas and leaders are in `test_faults.py`, data that runs out in
`tests/coordinator/test_replica.py`.
"""

import re

import process_runs
import pytest


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
  with process_runs.Machine(tmp_path_factory.mktemp("processes")) as made:
    made.prepare(4)
    yield made


def _members(commit):
  return [member["replica"] for member in commit["members"]]


def test_a_stuck_replica_is_named_and_the_others_go_on(machine, tmp_path):
  """JAX issue 38503: it lives and sends heartbeats, but does nothing else."""
  run = process_runs.Run(machine, tmp_path, 2, 3, attempt_timeout=2.0)
  fault = {"phase": "reduce_scatter", "time": 2, "what": "hang"}
  jobs = {f"replica_{i}": {"period": 0.05} for i in range(2)}
  *others, stuck = run.start(
    3, first_alone=True, replica_2={"fault": fault}, **jobs
  )
  machine.wait(lambda: stuck.said("struck"), "the hang")
  machine.wait(lambda: run.records("lost"), "the loss of who is stuck")
  run.wait_steps(5, others)
  assert stuck.process.popen.poll() is None
  lost = run.records("lost")[0]
  assert lost["replica"] == 2
  assert re.search("stuck|byte|silen", lost["reason"]), lost
  # It held the others up for an attempt, which is far from the time-out.
  commits = run.records("commit")
  after = next(c for c in commits if c["step"] == lost["step"])
  before = next(c for c in commits if c["step"] == lost["step"] - 1)
  assert after["time"] - before["time"] < process_runs.TIMEOUT / 3
  stuck.tell("release")
  run.wait_steps(5)
  run.finish()
  run.check()
  assert stuck.result["stats"]["rejoins"] >= 1
  # As it has heard of the failure first, or of having been given up.
  assert {"failed", "lost"} & set(stuck.result["reasons"].values())


@pytest.mark.parametrize(
  "checkpointed", [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_a_restart_averages_in_nothing_old(machine, tmp_path, checkpointed):
  """TensorFlow's accumulators outlived a restart, and old gradients counted.

  The store goes on; a gradient of the first life has arrived at its leader, and
  its replica wakes up while the second life trains.
  """
  path = tmp_path / "checkpoint"
  first = process_runs.Run(machine, tmp_path, 2, 2, name="first")
  fault = {"phase": "arrived", "time": 7, "what": "stop"}
  leader, ghost = first.start(
    2,
    first_alone=True,
    replica_0={"save": [4, str(path)]},
    replica_1={"fault": fault},
  )
  machine.wait(lambda: ghost.said("struck"), "a gradient of the first life")
  leader.kill()
  before = first.records()
  second = process_runs.Run(machine, tmp_path, 2, 2, name="second")
  job = {"incarnation": 1, "restore": str(path) if checkpointed else None}
  for replica in range(2):
    second.add(replica, **job)
  second.begin()
  second.wait_steps(3)
  ghost.process.signal(process_runs.CONTINUE)
  second.wait_steps(5)
  second.finish()
  second.check(before if checkpointed else ())
  commits = second.records("commit")
  assert commits[0]["step"] == (4 if checkpointed else 0)
  assert {key[:2] for _, key in second.gradients()} == {(0, 1), (1, 1)}
  ghost.kill()
  # Nor did the first life go on by itself with what had arrived.
  assert all(c["step"] < 6 for c in first.records("commit"))
