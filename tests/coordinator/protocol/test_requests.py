"""A request of a replica is executed once, whichever answers it receives."""

from optax_dist.coordinator.protocol.history import RECENT
from tests.coordinator.protocol.room import room_after


def test_hyperparameter_set_while_a_replica_was_away_is_not_set_again():
  """The next request does not repeat it: another replica may have set it since."""
  room = room_after(
    "run needed=1 replicas=2 inline_bytes=8 lower_on_loss=yes",
    "start a b",
    "submit a",
    "submit b",
    "set b rate 0.1",
    "hold b",
    *["submit a"] * (RECENT + 1),
    "break b",
    "let b",
    "wait 1",
    "snapshots",
    "set a rate 0.01",
    "submit a",
  )
  assert "values=[['momentum', 0.9]]" in room.execute("set b momentum 0.9")[0]


def test_pending_hyperparameters_are_part_of_the_next_request():
  room = room_after(
    "run needed=1 replicas=2 inline_bytes=8", "start a b", "set b rate 0.1"
  )
  told = room.execute("set b momentum 0.9")[0]
  assert "values=[['rate', 0.1], ['momentum', 0.9]], number=2" in told
  room.execute("kill coordinator")
  room.execute("set b rate 0.2")
  room.execute("restart")
  told = "".join(room.execute("wait 1"))
  assert "values=[['rate', 0.2], ['momentum', 0.9]], number=3" in told
