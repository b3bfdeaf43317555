"""Tests of what a leader sends to the processes that follow the log."""

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Record,
  Removed,
)
from optax_dist.coordinator.protocol.leader.publisher import Publisher
from optax_dist.coordinator.protocol.membership import View


def record(number):
  return Record(1, (Removed(number, True, "left"),))


def commit():
  attempt = AttemptId(1, 0, 0, 0)
  entry = Committed(attempt, (), b"mean", False, (), ())
  return Record(1, (entry,))


def publisher(first=10, block=2, followers=()):
  made = Publisher(first, record(first), block)
  for process in followers:
    follow(made, process, first + 1, first + 1)
  return made


def follow(made, process, position, end):
  hello = msg.Hello((), 0, f"at {process}", -1, position, 0, call=3)
  effects = made.follow(process, hello, 7, end, View())
  assert all(effect.peer == process for effect in effects)
  return [effect.message for effect in effects]


def test_a_follower_is_sent_what_it_lacks():
  made = publisher()
  made.append(11, record(11))
  assert follow(made, "p1", 11, 12) == [
    msg.Welcome(3, 11, None, 7),
    msg.Recorded(11, record(11)),
  ]
  assert follow(made, "p2", 12, 12) == [msg.Welcome(3, 12, None, 7)]
  assert made.followers == {"p1": "at p1", "p2": "at p2"}


@pytest.mark.parametrize("position", [-1, 9])
def test_a_follower_that_lacks_what_is_not_kept_is_sent_the_view(position):
  made = publisher()
  assert follow(made, "p1", position, 11) == [msg.Welcome(3, 11, View(), 7)]


def test_old_records_are_forgotten():
  made = publisher(first=10, block=2)
  assert made.oldest == msg.Recorded(10, record(10))
  for position in range(11, 16):
    made.append(position, record(position))
  assert made.oldest == msg.Recorded(12, record(12))


def test_a_record_is_sent_to_all_as_one_message():
  made = publisher(followers=("p1", "p2"))
  assert made.append(11, commit()) == [
    fx.SendAll(("p1", "p2"), msg.Recorded(11, commit()))
  ]


def test_nobody_is_sent_anything_once_dropped():
  made = publisher(followers=("p1",))
  made.drop("p1")
  assert made.append(11, commit()) == made.to_all(msg.NotLeader()) == []
