"""Processes of a replica find each other while others come, go, or die."""

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.coordinator.meetings import Meetings

PLACE = "10.0.0.1:29500"


class Replica:
  """The last message to each process."""

  def __init__(self, count=2):
    self.meetings, self.count, self.told = Meetings(), count, {}

  def _tell(self, effects):
    messages = {peer: e.message for e in effects for peer in e.peers}
    self.told |= messages
    return {*messages}

  def call(self, peer, index, generation="", replica=0):
    place = "" if index else PLACE
    meet = msg.Meet("", replica, index, self.count, place, generation)
    return self._tell(self.meetings.called(peer, meet))

  def lose(self, peer, how="broken"):
    return self._tell(self.meetings.lost(peer, how, "killed"))


def met(count=2):
  replica = Replica(count)
  for index in range(count):
    replica.call(f"a{index}", index)
  return replica


def test_address_of_process_0_is_announced_once_all_are_present():
  replica = Replica(3)
  replica.call("a2", 2)
  assert replica.told["a2"] == msg.Awaited((0, 1))
  replica.call("a0", 0)
  assert replica.told["a2"] == replica.told["a0"] == msg.Awaited((1,))
  assert replica.call("a1", 1) == {"a0", "a1", "a2"}
  assert set(replica.told.values()) == {msg.Met("a0", PLACE)}


def test_process_that_leaves_early_is_awaited_again():
  replica = Replica(3)
  replica.call("a0", 0)
  replica.call("a1", 1)
  assert replica.lose("a1") == {"a0"}
  assert replica.told["a0"] == msg.Awaited((1, 2))
  replica.call("a2", 2)
  replica.call("b1", 1)
  assert replica.told["b1"] == replica.told["a0"] == msg.Met("a0", PLACE)


def test_restarted_process_ends_the_others():
  replica = met()
  # The connection of the one before may still look well.
  assert replica.call("b1", 1) == {"a0", "a1", "b1"}
  assert "process 1 has started again" in replica.told["a0"].reason
  assert replica.told["b1"] == msg.Awaited((0,))
  assert not replica.lose("a0")
  replica.call("b0", 0)
  assert replica.told["b1"] == msg.Met("b0", PLACE)


def test_next_coordinator_knows_which_processes_have_met():
  replica = Replica()
  assert not replica.call("a0", 0, generation="a0")
  assert not replica.call("a1", 1, generation="a0")
  assert replica.lose("a1") == {"a0"}


def test_second_process_of_a_rank_replaces_the_first():
  replica = Replica()
  replica.call("a1", 1)
  replica.call("b1", 1)
  assert "another process 1" in replica.told["a1"].reason
  assert not replica.lose("a1")
  replica.call("b0", 0)
  assert replica.told["b1"] == msg.Met("b0", PLACE)


def test_mismatched_process_counts_are_named():
  replica = Replica()
  replica.call("a0", 0)
  replica.call("a2", 2)
  assert "process 2 of 2" in replica.told["a2"].reason
  replica.count = 3
  replica.call("b1", 1)
  assert "process 1 of 3, others of 2" in replica.told["b1"].reason
