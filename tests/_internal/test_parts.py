"""Leaves in one flat part per replica."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal import parts

N = 4
_SHAPES = [(3, 5), (8,), (), (0, 2), (3, 5)]


@pytest.mark.parametrize("shape", _SHAPES)
def test_rows_come_together_again(shape):
  x = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)
  rows = parts.rows(x, N)
  assert rows.shape == (N, parts.length(shape, N))
  # Compilers crash on parts without an element.
  assert rows.shape[1] == max(1, -(-x.size // N))
  np.testing.assert_array_equal(rows.reshape(-1)[: x.size], x.reshape(-1))
  np.testing.assert_array_equal(rows.reshape(-1)[x.size :], 0)
  np.testing.assert_array_equal(parts.whole(rows, shape), x)


@pytest.mark.parametrize("map_name", ["vmap", "shard_map", "shard_map_vma"])
@pytest.mark.parametrize("mean", [False, True])
def test_scattered_sums_gather_to_the_whole(map_name, mean):
  rng = np.random.default_rng(0)
  leaves = [rng.normal(size=(N, *s)).astype(np.float32) for s in _SHAPES]
  leaves.append(rng.integers(0, 9, (N, 6)).astype(np.float16))

  def step(*leaves):
    names = (maps.AXIS,)
    own = parts.reduce_scatter(leaves, names, N, mean)
    return own, parts.all_gather(own, leaves, names, N)

  own, whole = maps.run(map_name, step, *leaves, size=N)
  for x, part, result in zip(leaves, own, whole, strict=True):
    expected = x.mean(0) if mean else x.sum(0)
    assert result.dtype == x.dtype
    for replica in range(N):
      np.testing.assert_allclose(
        result[replica], expected, rtol=1e-5, atol=1e-6
      )
    if x.size:
      rows = parts.rows(jnp.asarray(expected), N)
      np.testing.assert_allclose(part, rows, rtol=1e-5, atol=1e-6)


def test_each_replica_has_its_own_part():
  x = jnp.arange(6.0)
  found = jax.vmap(
    lambda _: parts.own(x, (maps.AXIS,), N), axis_name=maps.AXIS
  )(jnp.zeros(N))
  np.testing.assert_array_equal(found, parts.rows(x, N))
