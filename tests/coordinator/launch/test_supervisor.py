"""The launcher's decisions, input by input."""

from optax_dist.coordinator.launch import supervisor as sup


class _Made:
  """A supervisor whose messages are kept apart from its other effects."""

  def __init__(self, count=3, elsewhere=0, **policy):
    policy = sup.Policy(**policy)
    self.machine = sup.Supervisor(range(count), policy, elsewhere)
    self.said = []
    start = [sup.StartReplica(i, 0) for i in range(count)]
    assert self.machine.start(0.0) == start

  def _sorted(self, effects):
    self.said += [e.line for e in effects if isinstance(e, sup.Say)]
    return [e for e in effects if not isinstance(e, sup.Say)]

  def ended(self, now, *given, **more):
    ended = sup.ReplicaEnded(*given, **more)
    return self._sorted(self.machine.ended(ended, now))

  def tick(self, now):
    return self._sorted(self.machine.tick(now))

  def joined(self, now, replica, run=""):
    return self._sorted(self.machine.joined(replica, run, now))

  def finished(self, now, run="", by=()):
    """The run has finished, and some have said so."""
    for replica in by:
      self.machine.left(replica, run)
    return self._sorted(self.machine.run_over(run, now))

  def leave(self, replica, now):
    """A replica joins, leaves and ends well."""
    effects = self.joined(now, replica)
    self.machine.left(replica, "")
    return effects + self.ended(now, replica, 0)


def test_killed_replica_restarts_with_growing_delays():
  made = _Made(restarts=9)
  assert made.ended(5.0, 1, -9) == [sup.StartReplica(1, 1)]
  now = 5.0
  for restarts, pause in enumerate(
    (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0), 2
  ):
    assert made.ended(now, 1, -9) == []
    assert made.tick(now + pause - 0.01) == []
    now += pause
    assert made.tick(now) == [sup.StartReplica(1, restarts)]


def test_replica_that_ran_long_restarts_at_once():
  made = _Made()
  made.ended(5.0, 1, -9)
  assert made.ended(70.0, 1, -9) == [sup.StartReplica(1, 2)]
  assert made.ended(72.0, 1, -9) == []


def test_restarts_are_refilled_after_an_hour_without_a_failure():
  made = _Made(2, restarts=1, needed=1)
  for restarts, now in enumerate((5.0, 3605.0, 7205.0), 1):
    assert made.ended(now, 1, -9) == [sup.StartReplica(1, restarts)]
    assert made.said[-1] == "replica 1 starts again (restart 1 of 1)"
  assert made.ended(10_804.0, 1, -9) == []
  left = "no restart is left of 1"
  assert made.said[-1] == f"replica 1 does not start again: {left}"


def test_replica_that_failed_restarts_after_a_delay():
  made = _Made(2)
  assert made.ended(5.0, 0, 1, "failed") == []
  [given_up] = made.ended(5.5, 1, 1, "failed")
  assert given_up.reason.startswith("No replica is left: replica 0 failed")
  # No replica has joined: the job would fail in the same way from any checkpoint.
  assert given_up.reason.endswith(
    "Correct that, and start this launcher again."
  )
  made = _Made(2)
  assert made.ended(5.0, 0, 1) == []
  assert made.tick(5.9) == []
  assert made.tick(6.0) == [sup.StartReplica(0, 1)]


def test_all_killed_replicas_restart():
  """The run begins again from the newest state that one of them brings."""
  made = _Made(2)
  for replica in (0, 1):
    made.joined(1.0, replica)
  assert made.ended(2.0, 0, -9) == [sup.StartReplica(0, 1)]
  assert made.ended(2.0, 1, -9) == [sup.StartReplica(1, 1)]
  # A replica that has left does not count.
  made = _Made(2)
  made.leave(0, 1.0)
  assert made.ended(2.0, 1, -9) == [sup.StartReplica(1, 1)]
  [given_up] = made.ended(3.0, 1, 1, "failed")
  assert given_up.reason.startswith("No replica is left: replica 1")
  assert given_up.reason.endswith("from its last checkpoint.")


def test_no_replica_starts_after_the_run_and_late_ones_are_killed():
  made = _Made(4)
  made.ended(4.5, 3, 1)
  for replica in (0, 1):
    made.joined(4.6, replica)
  assert made.finished(5.0) == []
  assert made.machine.over
  made.joined(5.1, 1)  # It was said at the same time.
  assert made.tick(5.9) == []
  assert made.tick(6.0) == [sup.KillReplica(2)]
  late = "replica 2 is stopped: the run has ended, and it had not joined"
  assert made.said[-1] == late
  assert made.tick(99.0) == []
  assert made.ended(6.2, 0, 0) == []
  # A member that fails after the run fails the job.
  assert made.ended(6.3, 1, 7, "failed") == [sup.JobEnded(7)]
  assert made.said[-1] == "replica 1 failed"


def test_killed_replicas_restart_for_another_run():
  """The first one needed it no more."""
  made = _Made(3, restarts=9)
  for replica in (0, 1):
    made.joined(1.0, replica, "a")
  assert made.finished(2.0, "a", by=(0, 1)) == []
  assert made.machine.over
  assert made.tick(3.0) == [sup.KillReplica(2)]
  assert made.ended(3.5, 1, -9) == []
  again = [sup.StartReplica(1, 1), sup.StartReplica(2, 1)]
  assert made.joined(4.0, 0, "b") == again
  assert not made.machine.over
  # A late report on the first run does not end the second.
  made.machine.failed(1, "it has ended", "missed")
  assert made.finished(5.0, "a") == []
  assert not made.machine.over
  assert made.finished(6.0, "b", by=(0,)) == []
  assert made.machine.over


def test_job_ends_with_the_last_of_its_concurrent_runs():
  made = _Made(2)
  for replica in (0, 1):
    for run in ("a", "b"):
      made.joined(1.0, replica, run)
  assert made.finished(2.0, "a", by=(0, 1)) == []
  assert made.ended(3.0, 1, -9) == [sup.StartReplica(1, 1)]
  # A replica that leaves one run is still in the other.
  assert not made.machine.over
  made.machine.left(0, "b")
  made.finished(4.0, "b")
  assert made.machine.over


def test_job_without_a_joined_replica_is_reported_once():
  made = _Made(2)
  assert made.tick(119.0) == []
  assert not made.said
  made.tick(120.0)
  made.tick(130.0)
  question = "no replica has joined; does the script call coordinator.join?"
  assert made.said == [f"after 120 s {question}"]
