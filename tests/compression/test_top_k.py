"""The largest of each chunk: against NumPy, its exact case, and its contraction."""

import jax.numpy as jnp
import numpy as np
import pairwise
import pytest
from compressing import received

from optax_dist import compression


def _by_hand(x, density, chunk):
  out = np.zeros_like(x)
  chunk = min(chunk, len(x))
  kept = max(1, round(density * chunk))
  for start in range(0, len(x), chunk):
    part = x[start : start + chunk]
    largest = np.argsort(-np.abs(part), kind="stable")[:kept]
    out[start + largest] = part[largest]
  return out


@pairwise.every_value(size=[5, 64, 200], density=[0.03, 0.3])
def test_top_k_follows_its_equation(size, density):
  x = np.random.default_rng(size).normal(size=size).astype(np.float32)
  method = compression.top_k(density, chunk=64)
  np.testing.assert_array_equal(
    received(method, jnp.asarray(x)), _by_hand(x, density, 64)
  )


def test_dense_top_k_is_exact():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 20)), jnp.float32)
  left = received(compression.top_k(1.0, chunk=50), x)
  np.testing.assert_array_equal(left, x)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_kept_values_are_rounded_to_even_levels(bits):
  x = np.random.default_rng(bits).normal(size=128).astype(np.float32)
  kept = _by_hand(x, 0.25, 128)
  scale, most = np.max(np.abs(x)), 2**bits - 1
  levels = (np.arange(most + 1) * 2 / most - 1) * scale
  nearest = levels[np.argmin(np.abs(kept[:, None] - levels), axis=1)]
  expected = np.where(kept != 0, nearest, 0)
  left = received(compression.top_k(0.25, bits=bits), jnp.asarray(x))
  np.testing.assert_allclose(left, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [3e38, 1e-35])
def test_huge_and_tiny_numbers_keep_their_size(size, bits):
  x = np.array([size, -size, size / 8, size], np.float32)
  got = received(compression.top_k(0.75, bits=bits), jnp.asarray(x))
  np.testing.assert_allclose(got, [size, -size, 0.0, size], rtol=1e-6)


@pairwise.every_value(bits=[8, 4, 2], bad=[np.inf, -np.inf, np.nan])
def test_a_chunk_that_is_not_finite_is_sent_as_nan(bits, bad):
  """An infinite scale would give infinity any sign."""
  method = compression.top_k(0.5, chunk=4, bits=bits)
  got = received(method, jnp.array([bad, 2.0, 1.0, 0.0, 3.0, -3.0, 0.0, 0.0]))
  assert np.isnan(got[:2]).all()
  np.testing.assert_array_equal(got[2:], [0.0, 0.0, 3.0, -3.0, 0.0, 0.0])
