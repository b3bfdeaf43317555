"""Of JAX's servers, two in this process; other processes are in test_engine."""

import gc
import time
import types

import numpy as np
import pytest

from optax_dist.coordinator import (
  buffer_pool,
  engine,
  jax_runtime,
  transfer_exchange,
)


def _side(name):
  pool = buffer_pool.BufferPool(shared=False)
  server = jax_runtime.RuntimeTransferServer("127.0.0.1")
  return types.SimpleNamespace(
    name=name,
    pool=pool,
    there=server.address,
    exchange=transfer_exchange.TransferExchange(server, pool, name),
  )


@pytest.fixture
def sides():
  sides = [_side("one"), _side("two")]
  yield sides
  for side in sides:
    side.exchange.close()
    side.pool.close()


def _given(side, ticket, nbytes, value, reader):
  array = side.pool.take(nbytes)
  array[:] = value
  side.exchange.offer(ticket, array, [reader.name])
  return array


def _fetched(side, peer, ticket, nbytes, timeout=5.0, **options):
  return side.exchange.fetch(
    peer.name, peer.there, ticket, nbytes, timeout, **options
  ).array


def _empties(side, within=5.0):
  end = time.monotonic() + within
  while side.exchange.pending():
    assert time.monotonic() < end, side.exchange.pending()
    gc.collect()
    time.sleep(0.01)


def test_memory_rests_until_it_was_pulled(sides):
  one, two = sides
  given = _given(one, 1, 1000, 5, two)
  start = given.ctypes.data
  one.pool.recycle(given)
  others = [one.pool.take(1000) for _ in range(4)]
  for other in others:
    one.pool.recycle(other)
  assert start not in [one.pool.take(1000).ctypes.data for _ in range(4)]
  assert (_fetched(two, one, 1, 1000) == 5).all()
  _empties(one)
  for _ in range(3):
    one.pool.recycle(one.pool.take(1000))
  assert start in [one.pool.take(1000).ctypes.data for _ in range(8)]


def test_memory_that_nobody_pulls_comes_back(sides, monkeypatch):
  one, two = sides
  monkeypatch.setattr(transfer_exchange, "_REVOKE_SECONDS", 0.1)
  size = transfer_exchange.PIECE + 5  # Two pieces.
  given = _given(one, 1, size, 5, two)
  assert one.exchange.pending() == 2
  time.sleep(0.2)
  assert one.exchange.pending() == 2  # It is not recycled.
  one.pool.recycle(given)
  _empties(one)
  with pytest.raises(engine.EngineTimeout):
    _fetched(two, one, 1, size, 0.05)


def test_a_fetch_given_up_is_taken_up_again(sides):
  one, two = sides
  with pytest.raises(engine.EngineTimeout, match="not within"):
    _fetched(two, one, 1, 1000, 0.05)
  assert two.exchange.pending() == 1
  with pytest.raises(engine.EngineTimeout, match="cancelled"):
    _fetched(two, one, 1, 1000, cancelled=lambda: True)
  given = _given(one, 1, 1000, 5, two)
  assert (_fetched(two, one, 1, 1000) == 5).all()
  assert two.exchange.pending() == 0
  # One that is never taken up holds memory only until it is there.
  with pytest.raises(engine.EngineTimeout):
    _fetched(two, one, 2, 1000, 0.05)
  one.pool.recycle(given)
  _given(one, 2, 1000, 5, two)
  _empties(two)
  _empties(one)


def test_what_was_fetched_stays_while_a_view_of_it_does(sides):
  one, two = sides
  size = transfer_exchange.PIECE + 1000
  kept = []
  for ticket in range(3):
    given = _given(one, ticket, size, ticket + 1, two)
    kept.append(_fetched(two, one, ticket, size)[-500:][100:])
    one.pool.recycle(given)
    gc.collect()
  assert [np.unique(view).tolist() for view in kept] == [[1], [2], [3]]
  # Memory that nobody looks at any more is used again.
  free = {view.ctypes.data for view in kept}
  del kept
  gc.collect()
  _given(one, 9, size, 9, two)
  again = _fetched(two, one, 9, size)
  assert again[-500:][100:].ctypes.data in free


def test_sizes_that_differ_are_an_error(sides):
  one, two = sides
  _given(one, 1, 1000, 5, two)
  with pytest.raises(engine.PeerLost, match="slic"):
    _fetched(two, one, 1, 500)


def test_a_peer_that_does_not_listen_is_lost(sides):
  one, _ = sides
  for there in ("127.0.0.1:9", "nonsense"):
    nobody = types.SimpleNamespace(name="nobody", there=there)
    with pytest.raises(engine.PeerLost, match="can't be reached"):
      _fetched(one, nobody, 1, 10)
  told = []
  one.exchange.watch("nobody", "127.0.0.1:9", lambda: told.append(1))
  end = time.monotonic() + 5.0
  while not told:
    assert time.monotonic() < end
    time.sleep(0.01)


def test_watches_can_end(sides):
  one, two = sides
  forget = [
    one.exchange.watch(two.name, two.there, lambda: pytest.fail("told"))
    for _ in range(2)
  ]
  assert one.exchange.pending() == 2
  forget[0]()
  forget[0]()
  assert one.exchange.pending() == 1
  one.exchange.close()
  forget[1]()
  assert one.exchange.pending() == 0
  with pytest.raises(engine.PeerLost, match="closed"):
    _fetched(one, two, 1, 10)
