"""Tests of the guarantees of every kind of transport."""

import threading
import time

import numpy as np
import pairwise
import pytest

from optax_dist.coordinator.transport import interface
from tests.coordinator.transport import worlds


def _array(nbytes, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, nbytes, np.uint8)


def test_messages_arrive_once_and_in_order(world):
  a, b = world.pair()
  sent = [bytes([i % 251]) * (i * 37 % 5000) for i in range(300)]
  for payload in sent:
    assert a.send("b", [payload[:5], memoryview(payload)[5:]])
  assert b.send("a", [b"back"])
  got = world.wait_for("b", interface.Message, 300)
  assert [m.payload for m in got] == sent
  assert {m.peer for m in got} == {"a"}
  back = world.wait_for("a", interface.Message)
  assert back == [interface.Message("b", b"back")]


def test_both_sides_get_a_peer_up_event(world):
  # At once, and not only with the first heartbeat.
  silence = interface.fixed(3000.0)
  world._limits = interface.Limits(heartbeat=1000.0, silence=silence)
  a, b = world.add("a"), world.add("b")
  world.connect("a", "b")
  assert world.wait_for("a", interface.PeerUp) == [interface.PeerUp("b")]
  assert world.wait_for("b", interface.PeerUp) == [interface.PeerUp("a")]
  assert list(a.peers()) == ["b"]
  assert list(b.peers()) == ["a"]


def test_transport_knows_whether_all_peers_share_memory(world):
  a, far = world.add("a", server="far"), world.add("far")
  assert not a.shares_memory
  world.add("b")
  world.connect("a", "far")
  world.connect("b", "a")
  world.wait_for("a", interface.PeerUp, 2)
  # No arrays are sent to its server, wherever that is.
  assert a.shares_memory == (world.kind == "unix")
  world.connect("far", "b")
  world.wait_for("far", interface.PeerUp, 2)
  assert far.shares_memory == (world.kind == "unix")
  a.disconnect("b")
  assert not a.shares_memory


def test_messages_sent_while_connecting_arrive(world):
  a, b = world.add("a"), world.add("b")
  world.connect("a", "b")
  data = _array(3_000_000)
  assert a.send("b", [b"first"])
  a.send_array("b", 1, data.data)
  a.expect("b", 1, bytearray(10), in_place=True)
  world.wait_for("b", interface.Message)
  b.expect("a", 1, bytearray(data.nbytes), in_place=True)
  b.send_array("a", 1, _array(10).data)
  (got,) = world.wait_for("b", interface.ArrayReceived)
  assert bytes(got.data) == data.tobytes()
  world.wait_for("a", interface.ArrayReceived)


@pairwise.every_pair(
  nbytes=[0, 1, 4096, 300_000, 5_000_001],
  first=["send", "expect"],
  given=[True, False],
  lent=[True, False],
)
def test_arrays_arrive_whole(world, nbytes, first, given, lent):
  a, b = world.pair()
  data = _array(nbytes)
  memory = a.allocate(nbytes) if lent else bytearray(nbytes)
  memory[:] = data.tobytes()
  into = bytearray(nbytes)
  if first == "send":
    a.send_array("b", 7, memory)
    world.run(0.02)
    b.expect("a", 7, into, in_place=not given)
  else:
    b.expect("a", 7, into, in_place=not given)
    world.run(0.02)
    a.send_array("b", 7, memory)
  (got,) = world.wait_for("b", interface.ArrayReceived)
  assert (got.peer, got.transfer) == ("a", 7)
  assert bytes(got.data) == data.tobytes()
  if given:
    assert bytes(into) == data.tobytes()
  else:
    b.release("a", 7)
  assert world.wait_for("a", interface.ArraySent) == [
    interface.ArraySent("b", 7, nbytes)
  ]
  world.run(0.02)
  assert len(world.events["a"]) == len(world.events["b"]) == 1
  assert a.bytes_out == b.bytes_in == nbytes
  assert a.pending() == b.pending() == 0


def test_lent_memory_is_not_reused_before_it_is_released(world):
  if world.kind in ("tcp", "tls"):
    pytest.skip("no memory is shared")
  a, b = world.pair()
  nbytes = 1_000_000
  memory = a.allocate(nbytes)
  memory[:] = bytes(nbytes)
  a.send_array("b", 1, memory)
  b.expect("a", 1, bytearray(nbytes), in_place=True)
  (got,) = world.wait_for("b", interface.ArrayReceived)
  assert got.data.readonly
  a.cancel("b", 1)
  where = np.frombuffer(memory, np.uint8).ctypes.data
  del memory
  other = a.allocate(nbytes)
  other[:] = b"\1" * nbytes
  assert bytes(got.data) == bytes(nbytes)
  b.release("a", 1)
  world.run(0.05)
  again = a.allocate(nbytes)
  assert np.frombuffer(again, np.uint8).ctypes.data == where
  assert not world.of("a", interface.ArraySent)


@pytest.mark.parametrize("leaves", ["its owner", "its reader"])
def test_lent_memory_is_never_reused_once_its_reader_is_lost(world, leaves):
  if world.kind in ("tcp", "tls"):
    pytest.skip("no memory is shared")
  a, b = world.pair()
  nbytes = 1_000_000
  memory = a.allocate(nbytes)
  memory[:] = bytes(nbytes)
  a.send_array("b", 1, memory)
  b.expect("a", 1, bytearray(nbytes), in_place=True)
  (got,) = world.wait_for("b", interface.ArrayReceived)
  if leaves == "its owner":
    a.disconnect("b")
    world.wait_for("b", interface.PeerLost)
  else:
    b.disconnect("a")
    world.wait_for("a", interface.PeerLost)
  del memory
  a.allocate(nbytes)[:] = b"\1" * nbytes
  assert bytes(got.data) == bytes(nbytes)
  # It was of the old connection: over a new one it means nothing.
  world.clear()
  world.connect("a", "b")
  world.wait_for("b", interface.PeerUp)
  b.release("a", 1)
  a.send("b", [b"still connected"])
  world.wait_for("b", interface.Message)
  assert not world.of("a", interface.PeerLost)


def test_messages_overtake_arrays(world):
  a, b = world.pair()
  data = _array(30_000_000)
  b.expect("a", 1, bytearray(data.nbytes), in_place=True)
  world.run(0.02)
  a.send_array("b", 1, data.data)
  a.poll(0)
  a.send("b", [b"quick"])
  world.wait_for("b", interface.ArrayReceived)
  kinds = [type(e) for e in world.events["b"]]
  assert kinds == [interface.Message, interface.ArrayReceived]


def test_many_arrays_at_once_in_both_directions(world):
  a, b = world.pair()
  sizes = [(i * 77_773) % 900_000 for i in range(40)]
  for i, nbytes in enumerate(sizes):
    a.send_array("b", i, _array(nbytes, i).data)
    b.send_array("a", i, _array(nbytes, i + 100).data)
  for i, nbytes in reversed(list(enumerate(sizes))):
    a.expect("b", i, bytearray(nbytes), in_place=True)
    b.expect("a", i, bytearray(nbytes), in_place=True)
  for name, seed in (("a", 100), ("b", 0)):
    for got in world.wait_for(name, interface.ArrayReceived, len(sizes)):
      want = _array(sizes[got.transfer], got.transfer + seed)
      assert bytes(got.data) == want.tobytes()
      world.all[name].release(got.peer, got.transfer)
  for name in "ab":
    world.wait_for(name, interface.ArraySent, len(sizes))


def test_a_wrong_size_fails_on_both_sides(world):
  a, b = world.pair()
  for first in (0, 1):
    world.clear()
    a.send_array("b", first, _array(2_000_000).data)
    if first:
      world.run(0.05)
    b.expect("a", first, bytearray(1_999_999), in_place=True)
    (failed,) = world.wait_for("b", interface.ArrayFailed)
    assert failed.transfer == first
    assert not failed.sending
    assert "1,999,999" in failed.reason
    (failed,) = world.wait_for("a", interface.ArrayFailed)
    assert failed.sending
  a.send("b", [b"and it goes on"])
  world.wait_for("b", interface.Message)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("when", ["before", "between", "midway"])
def test_cancelled_transfers_fail_on_the_other_side(world, who, when):
  a, b = world.pair()
  one, other = (a, b) if who == "sender" else (b, a)
  name, peer = one.name, other.name
  data = _array(20_000_000)

  def begin(side):
    if side is a:
      a.send_array("b", 5, data.data)
    else:
      b.expect("a", 5, bytearray(data.nbytes), in_place=True)

  if when == "before":
    one.cancel(peer, 5)
    world.run(0.05)
    begin(other)
  elif when == "between":
    begin(one)
    world.run(0.05)
    one.cancel(peer, 5)
    world.run(0.05)
    begin(other)
  else:
    begin(a)
    begin(b)
    for _ in range(3):
      a.poll(0), b.poll(0)
    one.cancel(peer, 5)
  (failed,) = world.wait_for(peer, interface.ArrayFailed)
  assert failed.peer == name
  assert failed.transfer == 5
  assert failed.sending == (other is a)
  a.send("b", [b"and it goes on"])
  world.wait_for("b", interface.Message)
  small = _array(100)
  a.send_array("b", 6, small.data)
  b.expect("a", 6, bytearray(100), in_place=True)
  world.wait_for("b", interface.ArrayReceived)
  assert not world.of(name, interface.ArrayFailed)


def test_a_goodbye_tells_its_reason_after_all_messages(world):
  a, b = world.pair()
  for _ in range(50):
    a.send("b", [b"x" * 1000])
  a.disconnect("b", "the budget is spent")
  (event,) = world.wait_for("b", interface.PeerLost)
  assert event == interface.PeerLost("a", "left", "the budget is spent")
  assert len(world.of("b", interface.Message)) == 50
  assert world.events["a"] == []
  assert list(a.peers()) == list(b.peers()) == []
  assert not b.send("a", [b"x"])


def test_goodbye_fails_arrays_on_both_sides(world):
  a, b = world.pair()
  a.expect("b", 1, bytearray(100), in_place=True)
  a.send_array("b", 2, bytes(3_000_000))
  b.expect("a", 2, bytearray(3_000_000), in_place=True)
  a.disconnect("b")
  failed = a.poll(1.0)
  assert {(f.transfer, f.sending) for f in failed} == {(1, False), (2, True)}
  assert all("closed the connection" in f.reason for f in failed)
  world.wait_for("b", interface.PeerLost)
  kinds = [type(e).__name__ for e in world.events["b"]]
  assert kinds == ["ArrayFailed", "PeerLost"]


def test_closing_is_a_goodbye_to_all(world):
  a, b = world.pair()
  c = world.add("c")
  world.connect("c", "a")
  world.wait_for("c", interface.PeerUp)
  world.all.pop("a")
  a.close("an exception: ZeroDivisionError")
  for name in "bc":
    (event,) = world.wait_for(name, interface.PeerLost)
    assert event.how == "left"
    assert "ZeroDivisionError" in event.reason
  with pytest.raises(RuntimeError, match="closed"):
    a.poll(0)
  a.close()
  a.wake()
  assert list(b.peers()) == list(c.peers()) == []


def test_transfers_with_a_lost_peer_fail_before_it_is_lost(world):
  a, b = world.pair()
  a.expect("b", 1, bytearray(100), in_place=True)
  a.send_array("b", 2, bytes(3_000_000))
  b.disconnect("a")
  world.wait_for("a", interface.PeerLost)
  kinds = [type(e).__name__ for e in world.events["a"]]
  assert kinds == ["ArrayFailed", "ArrayFailed", "PeerLost"]
  a.expect("b", 3, bytearray(10), in_place=True)
  a.send_array("b", 4, b"x")
  a.release("b", 9)
  a.cancel("b", 4)
  a.disconnect("b")
  assert a.idle("b", 3) is None
  failed = a.poll(1)
  assert [(f.transfer, f.sending) for f in failed] == [(3, False), (4, True)]


def test_a_peer_can_connect_again(world):
  a, b = world.pair()
  for i in range(20):
    one, other = (a, b) if i % 2 else (b, a)
    one.disconnect(other.name)
    world.wait_for(other.name, interface.PeerLost)
    world.clear()
    world.connect(*("ab" if i % 3 else "ba"))
    world.wait_for("a", interface.PeerUp)
    world.wait_for("b", interface.PeerUp)
    a.send("b", [b"%d" % i])
    (got,) = world.wait_for("b", interface.Message)
    assert got.payload == b"%d" % i


@pytest.mark.parametrize("seed", range(5))
def test_peers_that_connect_to_each_other_share_one_connection(world, seed):
  a, b = world.add("a"), world.add("b")
  rng = np.random.default_rng(seed)
  for one, other in rng.permutation([("a", "b"), ("b", "a")]):
    world.connect(one, other)
    for transport in rng.permutation([a, b]):
      for _ in range(rng.integers(3)):
        world.events[transport.name] += transport.poll(0)
    world.all[one].send(other, [b"from " + one.encode()])
  world.wait_for("a", interface.Message)
  world.wait_for("b", interface.Message)
  world.run(0.05)
  for name in "ab":
    assert [type(e).__name__ for e in world.events[name]] == [
      "PeerUp",
      "Message",
    ]


def test_peer_has_ended_if_another_process_answers_at_its_address(world):
  a = world.add("a")
  world.add("b")
  a.connect("c", world.address("b"))
  (event,) = world.wait_for("a", interface.PeerLost)
  assert event.peer == "c"
  assert event.how == "gone"
  assert not world.events["b"]


def test_an_absent_peer_is_unreachable_within_the_limit(world):
  limits = interface.Limits(connect=0.3)
  a = world.add("a", limits=limits)
  gone = world.add("gone")
  address = world.address("gone")
  world.all.pop("gone").close()
  assert gone.name == "gone"
  begun = time.monotonic()
  a.connect("gone", address)
  assert a.send("gone", [b"x"])
  a.expect("gone", 1, bytearray(10), in_place=True)
  world.wait_for("a", interface.PeerLost)
  assert worlds.lost(world, "a") == ["unreachable"]
  assert time.monotonic() - begun > 0.2


@pytest.mark.parametrize(
  ("peer", "address", "reason"),
  [
    ("c", "nonsense", "An address is host:port"),
    ("c", "", "An address is host:port"),
    ("", "127.0.0.1:1", "A name has 1 to 64 bytes"),
    ("a", "127.0.0.1:1", "'a' is this process"),
  ],
)
def test_an_invalid_name_or_address_is_unreachable_at_once(
  world, peer, address, reason
):
  a = world.add("a")
  a.connect(peer, address)
  assert not a.send(peer, [b"x"])
  a.expect(peer, 1, bytearray(10), in_place=True)
  lost, failed = a.poll(0)
  assert (lost.peer, lost.how) == (peer, "unreachable")
  assert reason in lost.reason
  assert (failed.peer, failed.transfer) == (peer, 1)
  assert a.poll(0) == []


def test_ended_peer_is_reported_at_once(world):
  limits = interface.Limits(connect=60.0)
  a, b = world.add("a", limits=limits), world.add("b")
  address = world.address("b")
  world.connect("a", "b")
  world.wait_for("a", interface.PeerUp)
  world.all.pop("b").close()
  world.wait_for("a", interface.PeerLost)
  world.clear()
  a.connect("b", address)
  (event,) = world.wait_for("a", interface.PeerLost)
  assert (event.peer, event.how) == (b.name, "gone")
  assert "it has ended" in event.reason


def test_poll_returns_after_its_timeout_or_a_wake(world):
  a = world.add("a")
  begun = time.monotonic()
  assert a.poll(0.05) == []
  assert time.monotonic() - begun > 0.04
  timer = threading.Timer(0.05, a.wake)
  timer.start()
  assert a.poll(None) == []
  a.wake()
  a.wake()
  assert a.poll(None) == []
  timer.join()
  begun = time.monotonic()
  assert a.poll(0.05) == []
  assert time.monotonic() - begun > 0.04


def test_a_message_that_is_too_large_is_refused(world):
  a, _ = world.pair()
  with pytest.raises(ValueError, match="at most 4,194,304 bytes"):
    a.send("b", [bytes(5 << 20)])
  a.send("b", [b"still fine"])
  world.wait_for("b", interface.Message)
