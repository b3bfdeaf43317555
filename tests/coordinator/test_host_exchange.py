import json

import numpy as np
import pytest

from optax_dist.coordinator import (
  engine,
  futex,
  host_exchange,
  jax_runtime,
  message_ring,
)


@pytest.fixture
def made():
  made = []

  def make(*, share_memory, transfer):
    server = jax_runtime.RuntimeTransferServer("127.0.0.1")
    made.append(
      host_exchange.HostExchange(
        share_memory=share_memory, transfer=server if transfer else None
      )
    )
    return made[-1]

  yield make
  for exchange in made:
    exchange.close()


def _elsewhere(address):
  """The address as it would be on another host."""
  place, transfer = json.loads(address)
  host, *numbers = json.loads(place)
  return json.dumps([json.dumps([f"other {host}", *numbers]), transfer])


def test_each_peer_is_reached_in_its_way(made):
  one = made(share_memory=True, transfer=True)
  near = made(share_memory=True, transfer=False)
  far = made(share_memory=False, transfer=True)
  given = one.buffer(1000)
  given[:] = np.arange(1000) % 256
  one.offer(1, given, [near.address, far.address])
  for reader in (near, far):
    fetched = reader.fetch(one.address, 1, 1000, 5.0)
    np.testing.assert_array_equal(fetched.array, given)
    assert reader.bytes_in == 1000
    fetched.check()
  assert one.bytes_out == 2000
  assert one.is_near(near.address)
  assert near.is_near(one.address)
  assert not one.is_near(far.address)
  assert not far.is_near(one.address)
  one.recycle(given)
  with pytest.raises(engine.EngineTimeout):
    near.fetch(one.address, 1, 1000, 0.0)


def test_notes_reach_those_of_this_host_who_can_be_woken(made, monkeypatch):
  one = made(share_memory=True, transfer=False)
  near = made(share_memory=True, transfer=False)
  far = made(share_memory=False, transfer=True)
  assert one.reaches(near.address) == near.reaches(one.address)
  assert one.reaches(near.address) == futex.is_available()
  assert not one.reaches(far.address)
  assert one.leave(7, b"note")
  assert near.find(one.address, [8, 7], 5.0) == (7, b"note")
  assert near.find(one.address, [8], 0.01) is None
  assert not one.leave(7, b"x" * (message_ring.LARGEST + 1))
  monkeypatch.setattr(futex, "is_available", lambda: False)
  assert not one.reaches(near.address)
  # An exchange can still be waited for.
  assert near.find(one.address, [8], 0.01) is None
  one.close()
  assert near.find(one.address, [7]) == (7, b"note")
  with pytest.raises(engine.PeerLost, match="closed its exchange"):
    near.find(one.address, [8], 5.0)
  with pytest.raises(engine.PeerLost, match="has been closed"):
    one.leave(7, b"")


def test_no_way_is_an_error_that_says_so(made):
  near = made(share_memory=True, transfer=False)
  far = made(share_memory=False, transfer=True)
  both = made(share_memory=True, transfer=True)
  for one, peer, who in [
    (near, far.address, "This process shares"),
    (near, _elsewhere(near.address), "This process shares"),
    (both, _elsewhere(near.address), "The peer shares"),
  ]:
    with pytest.raises(engine.PeerLost, match=who):
      one.fetch(peer, 1, 10, 1.0)
    with pytest.raises(engine.PeerLost, match="no transfer"):
      one.offer(1, one.buffer(10), [peer])
    with pytest.raises(engine.PeerLost, match="no transfer"):
      one.watch(peer, lambda: None)
    assert one.bytes_in == one.bytes_out == one.pending() == 0


def test_closed_is_closed(made):
  one = made(share_memory=True, transfer=True)
  given = one.buffer(10)
  one.offer(1, given, [one.address])
  one.watch(one.address, lambda: None)
  assert one.pending() == 2
  one.close()
  one.close()
  assert one.pending() == 0
  one.recycle(given)
  for call in (
    lambda: one.buffer(10),
    lambda: one.offer(2, given, [one.address]),
    lambda: one.fetch(one.address, 1, 10, 1.0),
    lambda: one.watch(one.address, lambda: None),
  ):
    with pytest.raises(engine.PeerLost, match="closed"):
      call()


@pytest.mark.parametrize(
  "text", ["", "[]", "[1,2]", "[null,3]", '["x",null]', "{}", "null"]
)
def test_addresses_of_strangers(text):
  with pytest.raises(ValueError, match="Not a"):
    host_exchange.Address.load(text)
