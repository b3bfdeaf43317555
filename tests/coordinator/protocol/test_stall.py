"""Whatever arrives, a run that takes no step for `timeout` ends."""

from tests.coordinator.protocol.room import room_after


def test_round_that_fails_repeatedly_ends_the_run():
  """The replica whose gradient is dropped computes another one each time."""
  room = room_after(
    "run needed=1 replicas=2 max_staleness=3",
    "start a b",
    "submit b",
    "means b",
    "fail a b",  # It can't have the state, and its mean does not reach the other.
  )
  for _ in range(11):
    room.execute("submit a 0")
    room.execute("fail b a")
    room.execute("wait 10")
  assert room.chief.history.ended is not None
  assert "no progress for" in room.chief.history.ended.reason


def test_dropped_gradient_does_not_count_as_a_stall():
  """As during an evaluation of all replicas."""
  room = room_after(
    "run needed=1 replicas=2 inline_bytes=8",
    "start a b",
    "submit a",
    "kill coordinator",
    "silent b",
    "submit a 0",
    "restart",
    "wait 200",
  )
  assert room.chief.history.ended is None
