"""Tests of when a replica calls its leader again."""

import pytest

from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.protocol.follower.link import FIRST_PAUSE, Link

LIMITS = deadlines.of(300.0)


@pytest.fixture
def link():
  return Link(LIMITS)


def test_a_call_that_is_not_answered_ends_after_the_patience(link):
  assert not link
  link.call("p0", 3.0)
  assert link
  assert "p0" in link
  assert link.deadline == 3.0 + LIMITS.patience
  assert not link.is_unanswered(link.deadline - 0.1)
  assert link.is_unanswered(link.deadline)
  link.follow()
  assert (link.leader, link.called) == ("p0", "")
  assert not link.is_unanswered(100.0)


def test_each_call_has_another_number(link):
  numbers = []
  for peer in ("p0", "p1", "p0"):
    link.call(peer, 0.0)
    numbers.append(link.calls)
  assert numbers == [1, 2, 3]


def test_whoever_is_refused_waits_longer_until_a_leader_welcomes_it(link):
  pauses = [link.pause_refused() for _ in range(5)]
  assert pauses == [0.05, 0.1, 0.2, 0.4, LIMITS.pace / 8]
  link.call("p0", 0.0)
  link.follow()
  assert link.pause_refused() == 0.05


def test_pauses_before_rejoining_double_up_to_the_pace(link):
  now, pauses = 0.0, [link.pause_removed(0.0, first=0.0)]
  while pauses[-1] < LIMITS.pace:
    now += pauses[-1]
    pauses.append(link.pause_removed(now, first=0.0))
  assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LIMITS.pace]


def test_a_removal_long_after_the_last_one_is_the_first_again(link):
  link.pause_removed(0.0, FIRST_PAUSE)
  # The next pause would be 0.1 s: ten of them are the limit.
  assert link.pause_removed(0.99, FIRST_PAUSE) == 0.1
  assert link.pause_removed(0.99 + 2.0, FIRST_PAUSE) == FIRST_PAUSE
  assert link.pause_removed(3.0, FIRST_PAUSE) == 0.1
