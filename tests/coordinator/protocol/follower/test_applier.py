"""From commits to the state: in order, once, speculative until it is decided."""

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Member,
  Part,
)
from optax_dist.coordinator.protocol.follower.applier import Applier
from optax_dist.coordinator.protocol.follower.session import Session
from optax_dist.coordinator.protocol.membership import View

MEMBERS = {i: Member(i, i, f"p{i}", f"at p{i}") for i in range(3)}


class Driven:
  """An applier of replica 0, with what it says and does."""

  def __init__(self, sound=True):
    self.out, self.told, self.session = [], [], Session()
    config = Config("p0", 0, "at p0", digest="s")
    tell = self.told.append
    self.applier = Applier(config, self.session, self.out, tell)
    view = View()
    view.origin_digest = "s" if sound else "another"
    self.applier.begin(view, 0)
    self.told.clear()

  def did(self):
    done, self.out[:] = self.out[:], []
    return done


def attempt_id(step=0, number=1, term=0):
  return AttemptId(term, step, number, 0)


def committed(step, mean=b"m", attempt=None):
  parts = (Part(1, 1, step, step, 0, 1, 1.0),)
  attempt = attempt or attempt_id(step)
  return Committed(attempt, parts, mean, False, (), ())


def attempt(step=0, number=1, readers=(), witness=None, parts=(0, 1)):
  made = tuple(Part(i, i, 0, step, 0, 1, 1.0) for i in parts)
  return msg.Attempt(attempt_id(step, number), made, readers, witness, 0)


def submit(driven):
  driven.session.submit(ins.Submitted(0, -1, 1, 0, 1, True, b""))


def test_a_member_reports_before_it_applies():
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  (aggregate,) = driven.did()
  assert isinstance(aggregate, fx.Aggregate)
  assert aggregate.me == 0
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  assert driven.told == [msg.Done(attempt_id())]
  assert driven.did() == [fx.Apply(attempt_id())]
  driven.applier.committed(committed(0, None))
  assert driven.did()[0] == fx.Publish(1, False)


def test_a_reader_collects_and_only_a_witness_reports():
  for witness in (None, 2):
    driven = Driven()
    message = attempt(readers=(2,), witness=witness)
    driven.applier.attempt(message, 2, MEMBERS)
    (collect,) = driven.did()
    assert isinstance(collect, fx.Aggregate)
    assert collect.me is None
    assert collect.readers == ()  # That is for members to know.
    driven.applier.aggregated(ins.Aggregated(attempt_id()))
    assert bool(driven.told) == (witness == 2)


def test_a_commit_waits_for_its_mean_and_those_behind_it_wait_too():
  driven = Driven()
  driven.applier.attempt(attempt(readers=(2,)), 2, MEMBERS)
  driven.applier.committed(committed(0, None))
  driven.applier.committed(committed(1))
  driven.did()
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  published = [e for e in driven.did() if isinstance(e, fx.Publish)]
  assert [e.step for e in published] == [1, 2]


def test_without_its_mean_a_snapshot_is_needed_and_later_commits_follow_it():
  driven = Driven()
  driven.applier.committed(committed(0, None))
  assert isinstance(driven.told[-1], msg.NeedsSnapshot)
  driven.applier.fetch(msg.Fetch(9, "p1", "at p1"))
  driven.applier.committed(committed(1))
  driven.applier.committed(committed(2))
  driven.did()
  driven.applier.fetched(ins.SnapshotFetched(9, 2))
  did = driven.did()
  assert fx.Restore(2, 9) in did
  assert did[-1] == fx.Publish(3, False)
  assert driven.told[-1] == msg.Applied(3)


def test_a_replica_that_joins_behind_the_run_needs_a_snapshot_at_once():
  driven = Driven()
  driven.applier.end()
  driven.applier.begin(View(), 3)
  assert isinstance(driven.told[-1], msg.NeedsSnapshot)


def test_only_the_snapshot_that_is_fetched_is_taken():
  driven = Driven(sound=False)
  other = ins.SnapshotFetched(8, 2)
  driven.applier.fetched(other)
  driven.applier.fetch(msg.Fetch(9, "p1", "at p1"))
  driven.did()
  driven.applier.fetched(other)
  driven.applier.fetch_failed(ins.SnapshotFailed(8, "it was cut"))
  assert driven.did() == [] == driven.told
  assert not driven.applier.sound
  driven.applier.fetched(ins.SnapshotFetched(9, 2))
  assert driven.did() == [fx.Restore(2, 9)]
  assert driven.told == [msg.Applied(2)]


def test_a_snapshot_that_failed_is_asked_for_again():
  driven = Driven(sound=False)
  driven.applier.fetch(msg.Fetch(9, "p1", "at p1"))
  driven.applier.fetch_failed(ins.SnapshotFailed(9, "it was cut"))
  assert driven.told == [msg.NeedsSnapshot(0)]
  assert "it was cut" in driven.applier.awaits


def test_who_needs_no_snapshot_says_so():
  driven = Driven()
  driven.applier.fetch(msg.Fetch(9, "p1", "at p1"))
  driven.applier.fetched(ins.SnapshotFetched(9, 0))
  assert driven.told == [msg.Applied(0)]
  assert driven.did() == []


def test_an_attempt_of_unknown_members_fails_at_once():
  driven = Driven()
  submit(driven)
  for message in (attempt(parts=(0, 7)), attempt(readers=(7,))):
    driven.applier.attempt(message, 0, MEMBERS)
  assert [(type(one), one.failed_replica) for one in driven.told] == [
    (msg.Failed, None),
    (msg.Failed, None),
  ]
  assert driven.did() == []


def test_a_gradient_that_is_not_here_fails_an_attempt_at_once():
  driven = Driven()
  driven.applier.attempt(attempt(), 0, MEMBERS)
  assert driven.told == [
    msg.Failed(attempt_id(), None, "it has no such gradient")
  ]
  assert driven.did() == []


def test_a_committed_step_is_never_reported_as_failed():
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  driven.applier.committed(committed(0, None))
  failed = ins.AggregateFailed(attempt_id(), 1, "it was lost")
  driven.applier.aggregate_failed(failed)
  assert [type(one) for one in driven.told] == [msg.NeedsSnapshot]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_snapshot_is_served_as_soon_as_it_is_of_use(steps):
  driven = Driven()
  driven.applier.serve(msg.Serve(4, "p2", "at p2", steps))
  serve = fx.ServeSnapshot(4, "p2", "at p2", steps)
  assert (serve in driven.did()) == (steps == 0)
  driven.applier.committed(committed(0))
  assert (serve in driven.did()) == (steps == 1)


def test_what_was_reported_is_kept_when_the_membership_ends():
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  driven.applier.end()
  driven.did()
  driven.applier.committed(committed(0, None))
  assert fx.Publish(1, False) in driven.did()


def test_means_are_released_when_nobody_can_need_them():
  driven = Driven()
  driven.applier.attempt(attempt(readers=(2,)), 2, MEMBERS)
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  driven.applier.committed(committed(0, None))
  released = []
  for step in range(1, 5):
    driven.applier.committed(committed(step))
    released += [e for e in driven.did() if isinstance(e, fx.Release)]
  assert released == [fx.Release(attempt_id())]


def test_another_attempt_ends_the_one_before():
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  driven.applier.attempt(attempt(number=2), 0, MEMBERS)
  cancelled = [e for e in driven.did() if isinstance(e, fx.Release)]
  assert cancelled == [fx.Release(attempt_id())]


def test_the_mean_of_a_lost_member_is_not_waited_for():
  driven = Driven()
  driven.applier.attempt(attempt(readers=(0,), parts=(1, 2)), 0, MEMBERS)
  commit = committed(0, None, attempt_id())
  driven.applier.committed(commit)
  assert "the mean of step 0" in driven.applier.awaits
  driven.did()
  driven.applier.removed(2)
  assert driven.did() == [fx.Release(attempt_id())]
  assert isinstance(driven.told[-1], msg.NeedsSnapshot)
  assert "a snapshot" in driven.applier.awaits


def test_a_mean_that_comes_as_its_attempt_is_given_up_is_not_applied():
  """It was released, so there is nothing left to apply."""
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  driven.applier.removed(1)
  driven.did()
  driven.told.clear()
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  assert driven.did() == [fx.Release(attempt_id())]
  assert not driven.told


def test_a_commit_whose_mean_is_nowhere_is_hopeless():
  driven = Driven()
  driven.applier.attempt(attempt(readers=(0,), parts=(1,)), 0, MEMBERS)
  driven.applier.committed(committed(0, None, attempt_id()))
  assert not driven.applier.hopeless  # It is being collected.
  driven.applier.committed(committed(1, None))
  driven.applier.removed(1)
  driven.applier.end()  # It is no longer a member, and no replica serves it.
  assert driven.applier.hopeless


def fetch_at(driven, step):
  driven.applier.fetch(msg.Fetch(1, "p1", "at p1"))
  driven.applier.fetched(ins.SnapshotFetched(1, step))


def test_it_knows_which_start_state_it_has():
  driven = Driven()
  own = driven.applier.start
  assert (own.step, own.digest) == (0, "s")
  driven.applier.committed(committed(0))
  assert driven.applier.step == 1
  assert driven.applier.start is None


def test_a_snapshot_of_the_run_s_start_is_that_start():
  """The state that it began with itself is gone."""
  driven = Driven(sound=False)
  assert driven.applier.start.digest == "s"
  fetch_at(driven, 0)
  assert driven.applier.start.digest == "another"
  # The run begins anew from yet another state, and then from this one.
  view = View()
  for digest, sound in (("s", False), ("another", True)):
    view.origin_digest = digest
    driven.applier.start_anew()
    driven.applier.begin(view, 0)
    assert driven.applier.sound == sound


def test_a_snapshot_of_a_later_step_is_no_start():
  driven = Driven(sound=False)
  fetch_at(driven, 3)
  assert driven.applier.start is None


def test_nothing_is_reported_that_no_leader_waits_for():
  driven = Driven()
  driven.applier.report(msg.Report(2))
  driven.applier.new_leader()  # Which has asked for nothing.
  for step in range(3):
    driven.applier.committed(committed(step))
  assert driven.told == []


def test_a_state_that_is_no_more_the_runs_is_not_reported():
  driven = Driven()
  driven.applier.start_anew()
  driven.applier.report(msg.Report(0))
  assert driven.told == []


def test_a_mean_that_is_here_is_kept_though_one_of_its_members_is_lost():
  """It may be committed yet."""
  driven = Driven()
  submit(driven)
  driven.applier.attempt(attempt(), 0, MEMBERS)
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  driven.applier.removed(1)
  driven.applier.committed(committed(0, None))
  assert fx.Publish(1, False) in driven.did()


def test_a_mean_is_kept_as_long_as_a_reader_lags_behind():
  driven = Driven()
  submit(driven)
  lagging = msg.Attempt(attempt_id(), attempt().parts, (2,), None, 4)
  driven.applier.attempt(lagging, 0, MEMBERS)
  driven.applier.aggregated(ins.Aggregated(attempt_id()))
  driven.applier.committed(committed(0, None))
  for step in range(1, 6):
    driven.applier.committed(committed(step))
  assert fx.Release(attempt_id()) not in driven.did()


def test_the_leader_is_told_once_the_step_it_asked_for_is_there():
  driven = Driven()
  driven.applier.report(msg.Report(1))
  assert driven.told == []
  driven.applier.committed(committed(0))
  assert driven.told == [msg.Applied(1)]


def test_after_a_gap_a_snapshot_resolves_what_was_committed_before_it():
  driven = Driven()
  submit(driven)
  commit = committed(0, None)
  driven.session.committed(commit, 1)
  driven.applier.committed(commit)
  driven.applier.skip()
  driven.applier.begin(View(), 5)
  fetch_at(driven, 5)
  (told,) = [e for e in driven.did() if isinstance(e, fx.Resolved)]
  assert (told.sequence, told.reason) == (0, "")
