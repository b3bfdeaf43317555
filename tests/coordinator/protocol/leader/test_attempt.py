"""Tests of which members read the mean of an attempt, and which are awaited."""

import math

from optax_dist import quorum
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import AttemptId, Member, Part
from optax_dist.coordinator.protocol.leader.attempt import (
  Attempt,
  announcement,
)
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster


def announced(*others, step=0):
  """The announcement of a step with the gradient of member 0 alone."""
  roster = Roster()
  me = MemberState(Member(0, 0, "p0", "at p0"), applied=step)
  for state in (me, *others):
    roster.add(state)
  parts = (Part(0, 0, 0, step, 0, 1, 1.0),)
  return announcement(AttemptId(0, step, 1, 0), parts, roster)


def member(incarnation, **fields):
  made = Member(incarnation, incarnation, f"p{incarnation}", "")
  return MemberState(made, **fields)


def test_members_slightly_behind_read_the_mean_and_the_nearest_is_the_witness():
  made = announced(member(1, applied=12), member(2, applied=19), step=20)
  assert (made.readers, made.witness, made.lag) == ((1, 2), 2, 8)


def test_a_member_far_behind_or_without_a_state_does_not_read_the_mean():
  assert announced(member(1, applied=11), step=20).readers == ()
  assert announced(member(1, applied=-1)).readers == ()


def test_a_member_that_is_served_a_snapshot_may_be_further_behind():
  served = {"needs": True, "server": 0}
  assert announced(member(1, applied=8, **served), step=40).readers == (1,)
  assert announced(member(1, applied=7, **served), step=40).readers == ()
  made = announced(member(1, applied=40, needs=True), step=40)
  assert made.readers == ()


def test_a_member_that_waits_for_a_snapshot_is_no_witness():
  """It has nothing to which it could apply the mean, if all others die."""
  waits = member(1, applied=20, needs=True, server=0)
  made = announced(waits, member(2, applied=19), step=20)
  assert (made.readers, made.witness) == ((1, 2), 2)
  assert announced(waits, step=20).witness is None


def test_a_witness_that_was_removed_is_not_waited_for():
  attempt = Attempt(announced(member(1, applied=0)), None, 0.0)
  assert attempt.done(0, attempt.id) == []
  assert attempt.dismiss(1) == [quorum.Done(0, 0, 1)]


def test_a_report_is_held_until_the_witness_has_the_mean():
  attempt = Attempt(announced(member(1, applied=0)), None, 0.0)
  assert attempt.done(0, attempt.id) == []
  assert attempt.done(1, attempt.id) == [quorum.Done(0, 0, 1)]


def test_only_members_that_have_begun_by_themselves_must_be_told_of_the_others():
  parts = tuple(Part(i, i, 0, 0, 0, 1, 1.0) for i in range(2))
  message = msg.Attempt(AttemptId(0, 0, 1, 0), parts, (), None, 0)
  attempt = Attempt(message, AttemptId(0, 0, 0, 0), 1.0)
  limits = deadlines.of(300.0)
  assert attempt.due(limits) == 1.0 + limits.attempt
  attempt.announce(2.0)
  assert attempt.due(limits) == math.inf
