"""The memory of a replica while a run continues without it."""

from optax_dist.coordinator.protocol import inputs as ins
from tests.coordinator.protocol.room import room_after


def test_replica_without_a_snapshot_does_not_queue_commits():
  """A replica that can't be sent one would have a mean of each."""
  room = room_after(
    "run needed=1 replicas=2 inline_bytes=8 lower_on_loss=yes",
    "start a",
    "submit a",
    "bring another 0",
    "start b",
  )
  for _ in range(50):
    room.execute("submit a")
    failed = ins.SnapshotFailed(room.fetches["b"], "not a byte came")
    room.give("b", failed)
    room.deliver()
  assert len(room.clients["b"].applier._todo) <= 1
  room.execute("submit a")
  assert "step=52" in "".join(room.execute("snapshots"))
