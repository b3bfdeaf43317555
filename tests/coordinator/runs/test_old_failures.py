"""What TensorFlow's SyncReplicasOptimizer failed at, with real processes.

After each test the ledger adds up, all replicas held the same parameters and
optimizer state after each step, no wait passed its deadline, and journal and
data alone give the same numbers again, to the last bit: `Run.check`.
"""

import re

import process_runs
import pytest

_DEAD = {"phase": "computing", "time": 4, "what": "kill"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
  with process_runs.Machine(tmp_path_factory.mktemp("processes")) as made:
    made.prepare(4)
    yield made


def _members(commit):
  return [member["replica"] for member in commit["members"]]


@pytest.mark.parametrize("then", ["lowered", "replaced"])
def test_a_replica_takes_a_token_and_dies(machine, tmp_path, then):
  """TensorFlow issue 5022: the token was lost with it, and all stood still."""
  lowered = then == "lowered"
  run = process_runs.Run(machine, tmp_path, 3, 3, lower_on_loss=lowered)
  *_, dead = run.start(3, replica_2={"fault": _DEAD})
  machine.wait(lambda: dead.over, "the death of replica 2")
  if lowered:
    run.wait_steps(5)
  else:
    run.add(2, incarnation=1)
    run.wait_steps(5)
  run.finish()
  run.check()
  commits = run.records("commit")
  [lost] = run.records("lost")
  assert lost["replica"] == 2
  for commit in commits:
    late = commit["step"] >= lost["step"]
    assert _members(commit) == ([0, 1] if late and lowered else [0, 1, 2])
  # The gradient that it died with is in no step, before or after.
  assert [key for _, key in run.gradients() if key[:2] == (2, 0)] == [
    (2, 0, i) for i in range(3)
  ]
  if lowered:
    # No worker waited for the token: its end is reported at once.
    next_one = next(c for c in commits if c["step"] == lost["step"])
    assert next_one["time"] - lost["time"] < process_runs.TIMEOUT / 3


def test_data_runs_out_on_some_replicas_first(machine, tmp_path):
  """TensorFlow issue 20342: the others waited indefinitely."""
  run = process_runs.Run(machine, tmp_path, 3, 3)
  run.start(3, replica_1={"gradients": 7}, replica_2={"gradients": 3})
  machine.wait(lambda: len(run.live) == 1, "the end of two replicas' data")
  run.wait_steps(5)
  run.finish()
  run.check()
  who = [_members(c) for c in run.records("commit")]
  assert who[:7] == [[0, 1, 2]] * 3 + [[0, 1]] * 4
  assert len(who) >= 12
  assert all(members == [0] for members in who[7:])
  assert [r["replica"] for r in run.records("leave")] == [2, 1]
  assert not run.records("lost")


def test_the_leader_is_killed(machine, tmp_path):
  """TensorFlow issues 7970 and 16213: without the leader nothing continued."""
  run = process_runs.Run(machine, tmp_path, 3, 3, lower_on_loss=True)
  fault = {"phase": "committing", "time": 5, "what": "kill"}
  first, *others = run.start(3, first_alone=True, replica_0={"fault": fault})
  machine.wait(lambda: first.over, "the death of the leader")
  run.wait_steps(5, others)
  # It comes back under its number, and has nothing to do with the past.
  run.add(0, incarnation=1)
  run.wait_steps(5)
  run.finish()
  run.check()
  one, two, *more = run.records("leader")
  assert (one["replica"], one["step"]) == (0, 0)
  # Four steps were committed, and the next leader begins after them. Who asks it
  # before it knows that it is leader may take its place at once.
  assert (two["replica"] in (1, 2), two["step"]) == (True, 4)
  assert all(r["replica"] in (1, 2) for r in more)
  after = {key[:2] for step, key in run.gradients() if step >= 4}
  assert after == {(1, 0), (2, 0), (0, 1)}


def test_the_leader_leaves_gracefully(machine, tmp_path):
  """The same issues: when the leader had done its steps the others hung."""
  run = process_runs.Run(machine, tmp_path, 3, 3)
  first, *others = run.start(3, first_alone=True, replica_0={"gradients": 4})
  machine.wait(lambda: first.over, "the end of the leader's data")
  run.wait_steps(5, others)
  run.finish()
  run.check()
  who = [_members(c) for c in run.records("commit")]
  assert who[:4] == [[0, 1, 2]] * 4
  assert len(who) >= 9
  assert all(members == [1, 2] for members in who[4:])
  one, two, *more = run.records("leader")
  assert (one["replica"], two["replica"] in (1, 2)) == (0, True)
  assert all(r["replica"] in (1, 2) for r in more)
  assert not run.records("lost")


def test_a_network_stall_in_mid_push(machine, tmp_path):
  """TensorFlow issue 12667: a push that never ended held everyone up."""
  run = process_runs.Run(
    machine, tmp_path, 3, 3, attempt_timeout=4.0, lower_on_loss=True
  )
  fault = {"phase": "reduce_scatter", "time": 3, "what": "stop"}
  *others, stopped = run.start(3, first_alone=True, replica_2={"fault": fault})
  machine.wait(lambda: stopped.said("struck"), "the stall")
  run.wait_steps(5, others)
  stopped.process.signal(process_runs.CONTINUE)
  (lost,) = run.records("lost")
  assert lost["replica"] == 2
  assert re.search("stuck|byte|silen", lost["reason"]), lost

  def takes_part_again():
    after = [c for c in run.records("commit") if c["step"] > lost["step"]]
    return [0, 1, 2] in map(_members, after)

  machine.wait(takes_part_again, "the stopped one in a commit")
  run.finish()
  run.check()
  # What it held is known to be dropped.
  assert {"failed", "lost"} & set(stopped.result["reasons"].values())


def test_two_optimizers_in_one_job(machine, tmp_path):
  """TensorFlow issue 11071: two optimizers shared one queue of tokens.

  Two processes train two models each, at the same time and over one store.
  """
  one = process_runs.Run(machine, tmp_path, 2, 2, name="one")
  two = process_runs.Run(machine, tmp_path, 2, 2, name="two", width=900)
  for run in (one, two):
    for replica in range(2):
      others = [m for m in one.members if run is two and m.replica == replica]
      process = others[0].process if others else None
      run.add(replica, process=process)
  one.begin()
  two.begin()
  for _ in range(2):
    one.wait_steps(5)
    two.wait_steps(5)
  # The end of one is not the end of the other.
  one.finish()
  two.wait_steps(5)
  two.finish()
  for run in (one, two):
    run.check()
    assert all(_members(c) == [0, 1] for c in run.records("commit"))
  # They were in flight at the same time.
  begun = [run.records("run")[0]["unix_time"] for run in (one, two)]
  assert begun[1] < begun[0] + one.records("finish")[0]["time"]


def test_a_stuck_replica_is_named_and_the_others_go_on(machine, tmp_path):
  """JAX issue 38503: it lives and sends heartbeats, but does nothing else."""
  run = process_runs.Run(machine, tmp_path, 2, 3, attempt_timeout=4.0)
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


def test_the_error_of_each_replica_names_the_stuck_one(machine, tmp_path):
  """The same where no step can be made without it: an error, in time."""
  run = process_runs.Run(
    machine, tmp_path, 2, 2, timeout=4.0, attempt_timeout=2.0
  )
  fault = {"phase": "computing", "time": 3, "what": "hang"}
  waiting, stuck = run.start(2, first_alone=True, replica_1={"fault": fault})
  machine.wait(lambda: stuck.said("struck"), "the hang")
  # It is released only after that.
  machine.wait(lambda: waiting.over, "the error of who waits")
  stuck.tell("release")
  machine.wait(lambda: stuck.over, "the error of who was stuck")
  for member in (waiting, stuck):
    error = member.result["error"]
    assert "no progress" in error
    assert "computing: replica 1" in error
    machine.give_back(member.process)
  assert [c["step"] for c in run.records("commit")] == [0, 1]


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


@pytest.mark.nightly
def test_a_replay_gives_the_same_parameters(machine, tmp_path):
  """From the journal and the data alone, though one of five was killed."""
  run = process_runs.Run(machine, tmp_path, 5, 5, lower_on_loss=True)
  *others, dead = run.start(5)
  run.wait_steps(5)
  dead.kill()
  run.wait_steps(8, others)
  run.finish()
  run.check()
  assert len(run.records("commit")) >= 13
  assert [r["replica"] for r in run.records("lost")] == [4]
