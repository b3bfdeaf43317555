"""Sessions come and go: events of their transfers, and memory that stays mapped."""

import pytest

from optax_dist.coordinator.transport import (
  interface,
  shared_memory,
)
from tests.coordinator.transport import worlds

_SIZE = shared_memory.LEAST


@pytest.fixture
def connect():
  """Makes transports of this host, each connected to those before it."""
  made = []

  def connect(*names, limits=None):
    made.append(worlds.World("unix", limits=limits))
    return made[-1], made[-1].connected(*names)

  yield connect
  for world in made:
    world.close()


def _offer(owner, reader):
  """Has the reader receive the same, but not poll it yet."""
  memory = owner.allocate(_SIZE)
  memory[:] = b"\1" * _SIZE
  owner.send_array(reader.name, 1, memory)
  reader.expect(owner.name, 1, bytearray(_SIZE), in_place=True)
  reader.flush()
  assert not owner.poll(0)
  reader._connections.run_once(0)
  assert isinstance(reader._events[-1], interface.ArrayReceived)


def test_a_peer_that_does_not_read_is_lost_and_the_others_receive(connect):
  limits = interface.Limits(max_queued=1000)
  world, (a, _, _) = connect("a", "b", "c", limits=limits)
  a.expect("b", 1, bytearray(10), in_place=True)
  a.send_array("b", 2, bytes(10))
  assert a.send("b", [bytes(900)])
  assert not a.send("b", [bytes(500)])
  assert not a.send("b", [b"it is lost by now"])
  assert a.send("c", [bytes(500)])
  events = a.poll(0)
  # Its transfers fail first: none is open once the loss is reported.
  kinds = [type(event).__name__ for event in events]
  assert kinds == ["ArrayFailed", "ArrayFailed", "PeerLost"]
  assert {event.peer for event in events} == {"b"}
  assert events[-1].how == "overflow"
  assert "1,000 bytes" in events[-1].reason
  (message,) = world.wait_for("c", interface.Message)
  assert message.payload == bytes(500)
  (lost,) = world.wait_for("b", interface.PeerLost)
  assert lost.how == "broken"
  assert not world.events["a"]


def test_last_message_of_a_closed_peer_is_received_while_sending(connect):
  """Writing fails before what the peer wrote is read."""
  _, (a, b) = connect("a", "b")
  a.send("b", [b"the last message"])
  a.close("all is done")
  b.send("a", [b"too late"])
  message, lost = b.poll(1.0)
  assert message.payload == b"the last message"
  assert (lost.how, lost.reason) == ("left", "all is done")


def test_disconnecting_keeps_the_events_of_other_peers(connect):
  _, (a, b, c) = connect("a", "b", "c")
  for peer in (a, b):
    _offer(peer, c)
  c.disconnect("a")
  (event,) = c.poll(0)
  assert event.peer == "b"
  assert bytes(event.data) == b"\1" * _SIZE
  c.release("b", 1)


@pytest.mark.parametrize(
  "call",
  [
    lambda one: one.send("b", [b"x"]),
    lambda one: one.send_array("b", 1, b"x"),
    lambda one: one.expect("b", 1, bytearray(1), in_place=True),
    lambda one: one.cancel("b", 1),
  ],
)
def test_calls_on_a_closed_transport_raise(connect, call):
  """As does one whose process has forked: the parent has the connections."""
  _, (a, _) = connect("a", "b")
  a.close()
  with pytest.raises(RuntimeError, match="closed, or its process has forked"):
    call(a)
