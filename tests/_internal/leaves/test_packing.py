"""Tests of leaves that share a message."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal import collectives
from optax_dist._internal.leaves import packing

N = 4
_SHAPES = [(3, 2), (), (5,), (1 << 19,), (2,)]


@pytest.fixture
def two_processes(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)


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
def test_small_leaves_share_a_message(map_name, messages, two_processes):
  found = []

  def look(*leaves):
    found.append(packing.together(leaves, [(maps.AXIS,)] * len(leaves)))
    return leaves[0]

  maps.run(map_name, look, *_leaves(), size=N)
  assert messages in found


def test_leaves_share_a_message_only_with_equal_types_and_axes(two_processes):
  found = []

  def look(a):
    leaves = [a, a, a.astype(jnp.bfloat16), a]
    over = [(maps.AXIS,)] * 3 + [()]
    found.append(packing.together(leaves, over))
    return a

  maps.run("shard_map", look, np.ones((N, 3), np.float32), size=N)
  assert [[0, 1], [2], [3]] in found


@pytest.mark.parametrize("map_name", ["shard_map", "pmap"])
def test_within_one_process_each_leaf_is_its_own_message(map_name):
  found = []

  def look(*leaves):
    found.append(packing.together(leaves, [(maps.AXIS,)] * len(leaves)))
    return leaves[0]

  maps.run(map_name, look, *_leaves(), size=N)
  assert [[0], [1], [2], [3], [4]] in found


@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma", "pmap"])
def test_sums_in_one_message_are_those_of_each_leaf(map_name, two_processes):
  def sums(*leaves):
    names = [(maps.AXIS,)] * len(leaves)
    return collectives.sum_leaves(leaves, names)

  leaves = _leaves()
  for x, total in zip(
    leaves, maps.run(map_name, sums, *leaves, size=N), strict=True
  ):
    np.testing.assert_allclose(total[0], x.sum(0), rtol=1e-5, atol=1e-5)
