"""Numbers and positions as bytes, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.compression import _bits


@pytest.mark.parametrize(
  ("count", "bound"), [(1, 1), (1, 600), (7, 7), (5, 64), (40, 100)]
)
def test_packed_positions_are_unpacked(count, bound):
  rng = np.random.default_rng(count)
  draws = [np.sort(rng.permutation(bound)[:count]) for _ in range(20)]
  edges = [np.arange(count), np.arange(bound - count, bound)]
  expected = np.stack(draws + edges).astype(np.int32)
  data = _bits.pack_positions(jnp.asarray(expected), bound)
  assert data.shape == (22, _bits.positions_size(count, bound))
  back = _bits.unpack_positions(data, count, bound)
  np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("density", [0.01, 0.03, 0.25])
def test_packed_positions_are_near_the_entropy_bound(density):
  """At least log2 of the number of subsets; at most 0.8 bits more for each."""
  bound = 4096
  count = round(density * bound)
  ranks = np.arange(1, count + 1)
  least = np.sum(np.log2(bound - count + ranks) - np.log2(ranks))
  size = _bits.positions_size(count, bound)
  assert least / 8 <= size <= (least + 0.8 * count) / 8 + 2
