"""Numbers and positions as bytes, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.compression import _bits


@pytest.mark.parametrize(
  ("width", "count"), [(1, 9), (2, 5), (3, 33), (4, 8), (12, 5), (32, 1)]
)
def test_numbers_come_back(width, count):
  rng = np.random.default_rng(width * 100 + count)
  codes = rng.integers(0, 2**width, (3, count), np.uint32)
  data = _bits.pack(jnp.asarray(codes), width)
  assert data.dtype == jnp.uint8
  assert data.shape == (3, _bits.packed_size(count, width))
  np.testing.assert_array_equal(_bits.unpack(data, width, count), codes)


@pytest.mark.parametrize(
  ("count", "bound"), [(1, 1), (1, 600), (7, 7), (5, 64), (40, 100)]
)
def test_positions_come_back(count, bound):
  rng = np.random.default_rng(count)
  draws = [np.sort(rng.permutation(bound)[:count]) for _ in range(20)]
  edges = [np.arange(count), np.arange(bound - count, bound)]
  expected = np.stack(draws + edges).astype(np.int32)
  data = _bits.pack_positions(jnp.asarray(expected), bound)
  assert data.shape == (22, _bits.positions_size(count, bound))
  back = _bits.unpack_positions(data, count, bound)
  np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("density", [0.01, 0.03, 0.25])
def test_positions_take_little_more_than_they_must(density):
  """At least log2 of the number of subsets; at most 0.8 bits more for each."""
  bound = 4096
  count = round(density * bound)
  ranks = np.arange(1, count + 1)
  least = np.sum(np.log2(bound - count + ranks) - np.log2(ranks))
  size = _bits.positions_size(count, bound)
  assert least / 8 <= size <= (least + 0.8 * count) / 8 + 2


def test_rows_are_packed_each_by_itself():
  rng = np.random.default_rng(0)
  rows = np.sort(
    np.stack([rng.permutation(64)[:5] for _ in range(6)]), axis=-1
  ).reshape(2, 3, 5)
  data = jax.jit(_bits.pack_positions, static_argnums=1)(rows, 64)
  back = jax.jit(_bits.unpack_positions, static_argnums=(1, 2))(data, 5, 64)
  np.testing.assert_array_equal(back, rows)


def test_floats_come_back_bit_for_bit():
  x = jnp.array([[0.0, -0.0, 1e-45], [np.inf, -np.pi, 3e38]], jnp.float32)
  back = _bits.bytes_to_floats(_bits.floats_to_bytes(x))
  np.testing.assert_array_equal(back.view(jnp.int32), x.view(jnp.int32))
