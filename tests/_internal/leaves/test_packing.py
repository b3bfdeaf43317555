"""Tests of leaves that share a buffer."""

import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves import packing
from optax_dist._internal.leaves.packing import Packing

N = 4
_SHAPES = [(3, 2), (), (5,), (1 << 14,), (2,)]


def _leaves(rng):
  return [rng.normal(size=(N, *shape)).astype(np.float32) for shape in _SHAPES]


def _packed(*lists):
  return Packing.of([(maps.AXIS,)] * len(lists[0]), *lists)


@maps.every_map
def test_what_is_packed_is_unpacked(map_name):
  xs = _leaves(np.random.default_rng(0))

  def there_and_back(*leaves):
    packed = _packed(leaves)
    buffers = packed.pack(leaves)
    first = packed.get(buffers, 0)
    buffers = packed.put(buffers, 4, jnp.full_like(leaves[4], 7))
    return packed.unpack(buffers), first

  back, first = maps.run(map_name, there_and_back, *xs, size=N)
  np.testing.assert_array_equal(first, xs[0])
  np.testing.assert_array_equal(back[4], np.full((N, 2), 7))
  for x, y in zip(xs[:4], back[:4], strict=True):
    np.testing.assert_array_equal(x, y)


@maps.every_map
def test_a_leaf_that_stays_by_itself_may_come_first(map_name):
  rng = np.random.default_rng(1)
  shapes = [(1 << 14,), (3,), (2, 2), (1 << 14,), (4,), (2,)]
  types = [
    np.float32,
    np.float32,
    np.float32,
    np.float16,
    np.float16,
    np.float16,
  ]
  xs = [
    rng.normal(size=(N, *shape)).astype(dtype)
    for shape, dtype in zip(shapes, types, strict=True)
  ]

  def there_and_back(*leaves):
    packed = _packed(leaves)
    return packed.unpack(packed.pack(leaves))

  for x, y in zip(
    xs, maps.run(map_name, there_and_back, *xs, size=N), strict=True
  ):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("map_name", "sizes"),
  [
    ("shard_map", [[1, 4, 2, 0], [3]]),
    ("shard_map_vma", [[1, 4, 2, 0], [3]]),
    ("pmap", [[1, 4, 2, 0], [3]]),
    ("vmap", [[0], [1], [2], [3], [4]]),
  ],
)
def test_the_small_ones_share_a_buffer_where_that_is_faster(map_name, sizes):
  found = []

  def look(*leaves):
    found.append([list(members) for members in _packed(leaves).buckets])
    return leaves[0]

  maps.run(map_name, look, *_leaves(np.random.default_rng(0)), size=N)
  assert sizes in found


def test_what_is_packed_alike_has_equal_types_in_each_list():
  found = []

  def look(a, b):
    narrow = b.astype(jnp.bfloat16)
    found.append(_packed([a, b, a, None], [a, b, narrow, a]).buckets)
    return a

  x = np.ones((N, 3), np.float32)
  maps.run("shard_map", look, x, x, size=N)
  assert ((0, 1), (2,), (3,)) in found


def test_a_buffer_has_room_for_so_much(monkeypatch):
  monkeypatch.setattr(packing, "_BUFFER_WITHIN", 4 * (1 + 2 + 5))
  assert (
    packing.fitting(
      [np.zeros(n, np.float32) for n in (5, 1, 6, 2)], np.asarray
    ).__len__()
    == 3
  )


def test_a_leaf_that_is_not_there_is_an_error():
  with pytest.raises(IndexError, match="no leaf 3"):
    Packing.side_by_side([jnp.ones(2)]).put([jnp.ones(2)], 3, jnp.ones(2))


def test_what_stays_by_itself_is_not_copied_to_be_computed_once():
  found = []

  def look(*leaves):
    packed = _packed(leaves)
    buffers = packed.pack(leaves)
    kept = packed.computed_once(buffers)
    found[:] = [
      (len(members), new is old)
      for members, new, old in zip(packed.buckets, kept, buffers, strict=True)
    ]
    return packed.unpack(kept)

  xs = _leaves(np.random.default_rng(0))
  back = maps.run("shard_map", look, *xs, size=N)
  assert sorted(found) == [(1, True), (4, False)]
  for x, y in zip(xs, back, strict=True):
    np.testing.assert_array_equal(x, y)
