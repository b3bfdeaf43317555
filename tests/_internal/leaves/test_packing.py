"""Tests of leaves that share a message."""

import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves import packing

N = 4
_SHAPES = [(3, 2), (), (5,), (1 << 14,), (2,)]


def _leaves():
  rng = np.random.default_rng(0)
  return [rng.normal(size=(N, *shape)).astype(np.float32) for shape in _SHAPES]


@pytest.mark.parametrize(
  ("map_name", "messages"),
  [
    ("shard_map", [[0, 1, 2, 4], [3]]),
    ("shard_map_vma", [[0, 1, 2, 4], [3]]),
    ("pmap", [[0, 1, 2, 4], [3]]),
    ("vmap", [[0], [1], [2], [3], [4]]),
  ],
)
def test_small_leaves_share_a_message_where_that_is_faster(map_name, messages):
  found = []

  def look(*leaves):
    found.append(packing.together(leaves, [(maps.AXIS,)] * len(leaves)))
    return leaves[0]

  maps.run(map_name, look, *_leaves(), size=N)
  assert messages in found


def test_leaves_share_a_message_only_with_equal_types_and_axes():
  found = []

  def look(a):
    leaves = [a, a, a.astype(jnp.bfloat16), a]
    over = [(maps.AXIS,)] * 3 + [()]
    found.append(packing.together(leaves, over))
    return a

  maps.run("shard_map", look, np.ones((N, 3), np.float32), size=N)
  assert [[0, 1], [2], [3]] in found


@maps.every_map
def test_joined_arrays_are_split_again(map_name):
  xs = [x.reshape(N, 1, -1) for x in _leaves()]

  def there_and_back(*arrays):
    return packing.split(packing.join(arrays), [x.shape[-1] for x in arrays])

  back = maps.run(map_name, there_and_back, *xs, size=N)
  for x, y in zip(xs, back, strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_single_array_is_not_copied():
  x = jnp.ones(3)
  assert packing.join([x]) is x
  assert packing.split(x, [3])[0] is x
  np.testing.assert_array_equal(packing.split(jnp.arange(3), [2])[0], [0, 1])
