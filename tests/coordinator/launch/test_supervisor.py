"""The launcher's decisions, input by input."""

import pytest

from optax_dist.coordinator.launch import supervisor as sup
from optax_dist.coordinator.launch.supervisor import State


def _made(count=3, **policy):
  made = sup.Supervisor(range(count), sup.Policy(**policy))
  assert made.start(0.0) == [sup.StartReplica(i, 0) for i in range(count)]
  return made


def test_all_end_well():
  made = _made(2)
  assert made.step(sup.ReplicaEnded(0, 0), 1.0) == []
  assert made.step(sup.ReplicaEnded(1, 0), 2.0) == [sup.JobEnded(0)]
  # Nothing comes after that.
  assert made.step(sup.LauncherStops(15), 3.0) == []


def test_a_killed_replica_starts_again_at_once_and_then_ever_later():
  made = _made(pauses=(0.5, 3.0), restarts=6)
  assert made.step(sup.ReplicaEnded(1, -9), 5.0) == [sup.StartReplica(1, 1)]
  now, pauses = 5.0, []
  for restarts in range(2, 7):
    assert made.step(sup.ReplicaEnded(1, -9), now) == []
    assert made.state(1) is State.WAITING
    pauses.append(made.deadline() - now)
    assert made.step(sup.Tick(), made.deadline() - 0.01) == []
    now = made.deadline()
    assert made.step(sup.Tick(), now) == [sup.StartReplica(1, restarts)]
  assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
  assert (made.restarts, made.restarts_left) == (6, 0)


def test_one_that_was_healthy_or_struck_itself_does_not_wait():
  made = _made(healthy=60.0)
  made.step(sup.ReplicaEnded(1, -9), 5.0)
  assert made.step(sup.ReplicaEnded(1, -9), 70.0) == [sup.StartReplica(1, 2)]
  made.step(sup.Struck(1), 71.0)
  assert made.step(sup.ReplicaEnded(1, -9), 71.0) == [sup.StartReplica(1, 3)]
  assert made.step(sup.ReplicaEnded(1, -9), 72.0) == []


def test_an_error_lets_the_others_settle_first():
  made = _made(2, settle=1.0)
  assert made.step(sup.ReplicaEnded(0, 1), 5.0) == []
  assert made.deadline() == 6.0
  assert made.step(sup.ReplicaEnded(1, 1), 5.5) == [
    sup.GiveUpRun("No replica is left")
  ]


def test_where_others_are_elsewhere_all_may_fail():
  made = _made(1, whole=False)
  assert made.step(sup.ReplicaEnded(0, -9), 5.0) == [sup.StartReplica(0, 1)]


def test_it_goes_on_with_fewer_while_they_are_enough():
  made = _made(3, restarts=0, needed=2)
  assert made.step(sup.ReplicaEnded(0, -9), 5.0) == []
  assert made.state(0) is State.ABSENT
  assert made.step(sup.ReplicaEnded(1, -9), 6.0) == [
    sup.GiveUpRun("1 replicas are left of 2 needed")
  ]
  made = _made(3, restarts=0, needed=2)
  made.step(sup.ReplicaEnded(0, -9), 5.0)
  made.step(sup.ReplicaEnded(1, 0), 6.0)
  assert made.step(sup.ReplicaEnded(2, 0), 6.0) == [sup.JobEnded(0)]


def test_one_that_left_holds_no_parameters():
  made = _made(2)
  made.step(sup.ReplicaEnded(0, 0), 1.0)
  assert made.step(sup.ReplicaEnded(1, -9), 2.0) == [
    sup.GiveUpRun("No replica is left")
  ]


def test_after_the_run_nobody_starts_and_who_comes_late_is_ended():
  made = _made(4, settle=1.0)
  made.step(sup.ReplicaEnded(3, 1), 4.5)
  assert made.state(3) is State.WAITING
  for replica in (0, 1):
    made.step(sup.Joined(replica), 4.6)
  assert made.step(sup.RunOver(), 5.0) == []
  assert made.state(3) is State.DONE
  made.step(sup.Joined(1), 5.1)  # It was said at the same time.
  assert made.deadline() == 6.0
  assert made.step(sup.Tick(), 6.0) == [sup.EndReplica(2)]
  assert made.deadline() is None
  assert made.step(sup.ReplicaEnded(2, -9), 6.1) == []
  assert made.step(sup.ReplicaEnded(0, 0), 6.2) == []
  # One that took part, and fails afterwards, is the job's failure.
  assert made.step(sup.ReplicaEnded(1, 7), 6.3) == [sup.JobEnded(7)]


def test_when_stopped_nobody_starts_and_the_code_is_the_signals():
  made = _made(3)
  made.step(sup.ReplicaEnded(0, 1), 1.0)
  made.step(sup.LauncherStops(15), 1.1)
  assert made.deadline() is None
  assert made.step(sup.ReplicaEnded(1, 0), 2.0) == []
  assert made.step(sup.ReplicaEnded(2, -15), 2.0) == [sup.JobEnded(143)]


def test_what_follows_from_an_end_is_said_with_the_restarts():
  made = _made(3, restarts=2, settle=1.0)
  made.step(sup.ReplicaEnded(0, -9), 5.0)
  assert made.outlook(0, -9, 5.0) == "it starts again at once (restart 1 of 2)"
  made.step(sup.ReplicaEnded(1, 3), 6.0)
  assert made.outlook(1, 3, 6.2) == "it starts again in 0.8 s (restart 2 of 2)"
  assert made.step(sup.Tick(), 7.0) == [sup.StartReplica(1, 1)]
  made.step(sup.ReplicaEnded(2, 3), 8.0)
  assert made.outlook(2, 3, 8.0).endswith("no restart is left of 2")
  assert made.failures_of(1) == 1
  # A replica that succeeds, and one that came too late, are no news.
  made.step(sup.Joined(0), 8.5)
  made.step(sup.RunOver(), 9.0)
  made.step(sup.ReplicaEnded(1, -9), 9.1)
  assert made.outlook(1, -9, 9.1) == ""
  made.step(sup.ReplicaEnded(0, -9), 9.2)
  assert (
    made.outlook(0, -9, 9.2) == "the run was over, and the exit code is 137"
  )


@pytest.mark.parametrize(("code", "shells"), [(0, 0), (3, 3), (-9, 137)])
def test_codes_are_those_of_shells(code, shells):
  assert sup.exit_code(code) == shells


def test_another_host_decides_about_some():
  made = sup.Supervisor(range(3), sup.Policy(needed=2, restarts=1), [1, 2])
  assert made.start(0.0) == [sup.StartReplica(0, 0)]
  made.step(sup.Joined(1), 1.0)
  assert made.step(sup.StartedElsewhere(1, 4), 2.0) == []
  assert made.restarts_of(1) == 4
  # It has to rejoin; a replica that does not is too late for the run.
  made.step(sup.Joined(0), 2.0)
  made.step(sup.Joined(2), 2.0)
  made.step(sup.RunOver(), 3.0)
  assert made.step(sup.Tick(), 5.0) == [sup.EndReplica(1)]


def test_one_that_can_not_be_started_is_missed():
  made = sup.Supervisor(range(3), sup.Policy(needed=2), [0, 1, 2])
  assert made.start(0.0) == []
  assert made.step(sup.CannotStart(1, "its host is gone"), 1.0) == []
  assert made.state(1) is State.ABSENT
  assert made.step(sup.CannotStart(2, "its host is gone"), 1.0) == [
    sup.GiveUpRun("1 replicas are left of 2 needed (its host is gone)")
  ]
