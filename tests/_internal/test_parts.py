"""Leaves in one part per replica."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal import parts

N = 4
_SHAPES = [(3, 5), (8,), (), (0, 2), (3, 5), (6, 8), (8, 3, 4), (2, 3, 5)]
#: Of a part: cut along the dimension that needs the least padding.
_PARTS = [(1, 5), (2,), (1,), (1, 1), (1, 5), (6, 2), (2, 3, 4), (2, 1, 5)]


@pytest.mark.parametrize(
  ("shape", "part"), list(zip(_SHAPES, _PARTS, strict=True))
)
def test_rows_come_together_again(shape, part):
  x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + 1
  x = jnp.asarray(x)
  rows = parts.rows(x, N)
  assert parts.shape_of(shape, N) == part
  assert rows.shape == (N, *part)
  found = np.sort(np.ravel(rows))
  np.testing.assert_array_equal(found[: -x.size or None], 0)
  np.testing.assert_array_equal(found[found > 0], np.ravel(x))
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
