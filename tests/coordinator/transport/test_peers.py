"""Sessions come and go: what is told of transfers, and whose memory is valid."""

import pytest

from optax_dist.coordinator.transport import (
  in_process,
  interface,
  shared_memory,
)

_SIZE = shared_memory.LEAST


@pytest.fixture
def connect():
  """Makes transports of one hub, each connected to those before it."""
  hub, made = in_process.Hub(), []

  def connect(*names, limits=None):
    for name in names:
      one = in_process.InProcessTransport(name, hub, limits)
      for other in made:
        one.connect(other.name, other.address)
        ups = one.poll(60) + other.poll(60)
        assert [type(e).__name__ for e in ups] == ["PeerUp"] * 2
      made.append(one)
    return made

  yield connect
  for one in made:
    one.close()


def _lent(owner, reader, transfer=1, poll=True):
  """An array of the owner's, which the reader reads in place."""
  memory = owner.allocate(_SIZE)
  memory[:] = bytes([transfer]) * _SIZE
  owner.send_array(reader.name, transfer, memory)
  owner.flush()
  reader.poll(0)
  reader.expect(owner.name, transfer, _SIZE)
  if not poll:
    return memory
  (event,) = reader.poll(0)
  assert event.data.readonly
  return memory


def test_a_peer_that_does_not_read_is_lost_and_the_others_receive(connect):
  limits = interface.Limits(max_queued=1000)
  a, b, c = connect("a", "b", "c", limits=limits)
  a.expect("b", 1, 10)
  a.send_array("b", 2, bytes(10))
  assert a.send("b", [bytes(900)])
  assert not a.send("b", [bytes(500)])
  assert not a.send("b", [b"it is lost by now"])
  assert a.send("c", [bytes(500)])
  events = a.poll(0)
  # Its transfers fail first: whoever reads of the loss has no open ones.
  kinds = [type(event).__name__ for event in events]
  assert kinds == ["ArrayFailed", "ArrayFailed", "PeerLost"]
  assert {event.peer for event in events} == {"b"}
  assert events[-1].how == "overflow"
  assert "1,000 bytes" in events[-1].reason
  assert [event.payload for event in c.poll(0)] == [bytes(500)]
  assert [event.how for event in b.poll(0)] == ["broken"]
  assert not a.poll(0)


def test_lent_memory_ends_with_its_connection(connect):
  """Its owner may have reused it in between."""
  a, b = connect("a", "b")
  _lent(a, b)
  a.disconnect("b")
  b.poll(0)
  a.connect("b", b.address)
  a.poll(0), b.poll(0)
  assert b.peers() == ["a"]
  assert not b.release("a", 1)
  # Only once, and what is lent over the new one is as good as any.
  assert b.release("a", 1)
  _lent(a, b, 2)
  assert b.release("a", 2)


@pytest.mark.parametrize("reads", [True, False])
def test_memory_of_a_disconnected_peer_is_not_readable(connect, reads):
  """The array has come; whether or not that was polled before."""
  a, b = connect("a", "b")
  _lent(a, b, poll=reads)
  b.disconnect("a")
  assert b.poll(0) == []
  # If it was, then its reader learns that what it has read may be anything.
  assert b.release("a", 1) == (not reads)


def test_disconnecting_keeps_the_events_of_other_peers(connect):
  a, b, c = connect("a", "b", "c")
  for peer in (a, b):
    _lent(peer, c, poll=False)
  c.disconnect("a")
  (event,) = c.poll(0)
  assert event.peer == "b"
  assert bytes(event.data) == b"\1" * _SIZE
  assert c.release("b", 1)


def test_a_freed_buffer_is_unmapped_by_all_peers(connect):
  """Otherwise each keeps it mapped, and there is a limit to their number."""
  a, b, c = connect("a", "b", "c")
  memory = a.allocate(_SIZE)
  for peer in (b, c):
    a.send_array(peer.name, 1, memory)
  a.flush()
  for peer in (b, c):
    peer.poll(0)
    assert len(peer._sessions["a"]._mapped) == 1
    peer.expect("a", 1, _SIZE, bytearray(_SIZE))
    peer.flush()
  assert len(a.poll(0)) == 2  # Both have read it.
  others = [a.allocate(_SIZE) for _ in range(20)]
  for buffer in (memory, *others):
    a.free(buffer)
  a.flush()
  for peer in (b, c):
    peer.poll(0)
    assert not peer._sessions["a"]._mapped


@pytest.mark.parametrize(
  "call",
  [
    lambda one: one.send("b", [b"x"]),
    lambda one: one.send_array("b", 1, b"x"),
    lambda one: one.fill("b", 1, 1),
    lambda one: one.expect("b", 1, 1),
    lambda one: one.cancel("b", 1),
  ],
)
def test_a_closed_transport_says_so(connect, call):
  """As does one whose process has forked: the parent has the connections."""
  a, _ = connect("a", "b")
  a.close()
  with pytest.raises(RuntimeError, match="closed, or its process has forked"):
    call(a)


@pytest.mark.parametrize("transfer", [-1, 2**63])
def test_a_transfer_number_out_of_range_is_refused_without_a_peer(
  connect, transfer
):
  (a,) = connect("a")
  for call in (
    lambda: a.send_array("nobody", transfer, b"x"),
    lambda: a.expect("nobody", transfer, 1),
    lambda: a.cancel("nobody", transfer),
    lambda: a.fill("nobody", transfer, 1),
  ):
    with pytest.raises(ValueError, match=f"from 0 to .*, got {transfer}"):
      call()
  assert a.poll(0) == []
