"""Whole states from one replica to another, as they are and in time."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator import embedded, engine, messages, snapshots

SECRET = b"secret"
AT, TO = 17, 4  # The position in the log, and whom it is for.


class Pair:
  """One who serves and one who fetches."""

  def __init__(self, secret=SECRET):
    world = embedded.World()
    self.giver, self.taker = world.connect("giver"), world.connect("taker")
    self.giving = snapshots.Snapshots(self.giver, SECRET)
    self.taking = snapshots.Snapshots(self.taker, secret)

  def serve(self, state, step=5, at=AT):
    address = self.taker.exchange.address
    self.giving.serve(state, step, at, TO, address)

  def fetch(self, like, timeout=1.0, at=AT, cancelled=lambda: False):
    address = self.giver.exchange.address
    return self.taking.fetch(like, at, TO, address, timeout, cancelled)


@pytest.fixture
def pair():
  return Pair()


def _state(seed):
  numbers = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(numbers.normal(size=shape), jnp.float32)
  return {
    "w": draw(5, 30),
    "half": draw(7).astype(jnp.bfloat16),
    "nothing": jnp.zeros((0, 3)),
    "count": jnp.asarray(seed, jnp.int32),
    "mask": draw(9) > 0,
    "key": jax.random.key(seed),
    "host": numbers.normal(size=4),
  }


def _same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert type(x) is type(y)
    assert x.dtype == y.dtype
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_state_arrives_bit_for_bit_and_of_the_same_kinds(pair):
  served = _state(1)
  pair.serve(served, step=23)
  found, step = pair.fetch(_state(2))
  assert step == 23
  _same(found, served)


def test_arrays_are_where_those_of_the_reader_are(pair):
  device = jax.devices()[1]
  pair.serve({"a": jnp.arange(3.0), "b": jnp.ones(2)})
  like = {"a": jax.device_put(jnp.zeros(3), device), "b": jnp.zeros(2)}
  found, _ = pair.fetch(like)
  assert found["a"].devices() == {device}
  # One that is committed would have programs compiled anew.
  assert (found["a"].committed, found["b"].committed) == (True, False)


def test_what_was_fetched_does_not_change_with_the_memory_it_came_from(pair):
  pair.serve({"a": jnp.arange(300.0)})
  found, _ = pair.fetch({"a": jnp.zeros(300)})
  for buffer in pair.giving._served:
    buffer[:] = 255
  np.testing.assert_array_equal(found["a"], np.arange(300.0))


def test_the_reader_may_come_first(pair):
  # The log asks the peer to serve when the reader may be waiting already.
  late = threading.Timer(0.1, pair.serve, ({"a": jnp.ones(3)},))
  late.start()
  found, _ = pair.fetch({"a": jnp.zeros(3)}, timeout=10.0)
  late.join(5.0)
  np.testing.assert_array_equal(found["a"], 1.0)


def test_each_is_for_its_place_in_the_log(pair):
  pair.serve({"a": jnp.ones(3)}, at=AT)
  pair.serve({"a": jnp.full(3, 2.0)}, at=AT + 1)
  later, _ = pair.fetch({"a": jnp.zeros(3)}, at=AT + 1)
  former, _ = pair.fetch({"a": jnp.zeros(3)}, at=AT)
  assert (float(former["a"][0]), float(later["a"][0])) == (1.0, 2.0)
  # The board does not keep what was said about them.
  assert pair.taker.board.items("snapshot") == {}


def test_what_is_not_served_in_time_is_an_error(pair):
  began = time.monotonic()
  with pytest.raises(engine.EngineTimeout, match=f"snapshot/{AT}/{TO}"):
    pair.fetch({"a": jnp.zeros(3)}, timeout=0.1)
  assert time.monotonic() - began < 2.0


def test_a_peer_that_has_ended_is_told(pair):
  pair.serve({"a": jnp.ones(3)})
  pair.giver.exchange.close()
  with pytest.raises(engine.PeerLost):
    pair.fetch({"a": jnp.zeros(3)}, timeout=10.0)


def test_a_fetch_can_be_cancelled(pair):
  # It is announced, and never comes.
  key = f"snapshot/{AT}/{TO}"
  header = {"kind": "snapshot", "step": 5, "nbytes": 64}
  pair.giver.board.put(key, messages.pack(SECRET, key, header))
  began = time.monotonic()
  with pytest.raises(engine.EngineTimeout):
    pair.fetch({"a": jnp.zeros(3)}, timeout=10.0, cancelled=lambda: True)
  assert time.monotonic() - began < 5.0


def test_a_state_of_another_size_is_refused(pair):
  pair.serve({"a": jnp.ones(300)})
  with pytest.raises(messages.BadMessage, match="bytes, not"):
    pair.fetch({"a": jnp.zeros(3)})


def test_who_has_another_secret_is_not_listened_to():
  pair = Pair(secret=b"another")
  pair.serve({"a": jnp.ones(3)})
  with pytest.raises(messages.BadMessage, match="secret"):
    pair.fetch({"a": jnp.zeros(3)})


def test_only_the_last_two_are_kept(pair, monkeypatch):
  recycled = []
  monkeypatch.setattr(pair.giver.exchange, "recycle", recycled.append)
  for number in range(5):
    pair.serve({"a": jnp.full(300, float(number))}, at=AT + number)
  assert len(recycled) == 3
  assert [buffer.view(np.float32)[0] for buffer in recycled] == [0, 1, 2]
  found, _ = pair.fetch({"a": jnp.zeros(300)}, at=AT + 3)
  assert found["a"][0] == 3
