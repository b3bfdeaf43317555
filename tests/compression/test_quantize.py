"""Few bits for each number: against the equations, and on average."""

import jax.numpy as jnp
import numpy as np
import pairwise
import pytest
from compressing import received

from optax_dist import compression


def _by_hand(x, bits, block):
  """The nearest whole multiples, block by block."""
  out = np.zeros_like(x)
  most = max(1, 2 ** (bits - 1) - 1)
  for start in range(0, len(x), block):
    part = x[start : start + block]
    if bits == 1:
      out[start : start + block] = np.where(part >= 0, 1, -1) * np.mean(
        np.abs(part)
      )
    else:
      scale = np.max(np.abs(part))
      out[start : start + block] = (
        np.floor(part / scale * most + np.float32(0.5)) / most * scale
      )
  return out


@pairwise.every_value(bits=[8, 4, 2, 1], size=[7, 64, 150])
def test_quantize_follows_its_equation(bits, size):
  x = np.random.default_rng(bits).normal(size=size).astype(np.float32)
  method = compression.quantize(bits, block=64)
  left = received(method, jnp.asarray(x))
  np.testing.assert_allclose(left, _by_hand(x, bits, 64), rtol=1e-5, atol=1e-6)


def test_size_is_that_of_bits_and_scales():
  tree = {"a": jnp.zeros((16, 32)), "b": jnp.zeros(5)}
  for bits in (8, 4, 2, 1):
    expected = 512 * bits // 8 + 2 * 4 + -(-5 * bits // 8) + 4
    assert compression.quantize(bits, block=256).sent(tree) == expected


def test_zeros_and_empty_arrays_are_kept():
  method = compression.quantize(4)
  np.testing.assert_array_equal(received(method, jnp.zeros((3, 4))), 0.0)
  assert received(method, jnp.zeros(0)).shape == (0,)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [3e38, 1e-35])
def test_huge_and_tiny_numbers_keep_their_size(size, bits):
  x = np.array([size, -size, 0.0, size], np.float32)
  got = received(compression.quantize(bits), jnp.asarray(x))
  np.testing.assert_allclose(got, x, rtol=1e-6)


@pairwise.every_pair(
  bits=[8, 4, 2, 1], stochastic=[False, True], bad=[np.inf, -np.inf, np.nan]
)
def test_a_block_that_is_not_finite_is_nan(bits, stochastic, bad):
  """Infinity times a code would have any sign."""
  method = compression.quantize(bits, block=2, stochastic=stochastic)
  got = received(method, jnp.array([1.0, bad, 2.0, -2.0]))
  assert np.isnan(got[:2]).all()
  np.testing.assert_array_equal(got[2:], [2.0, -2.0])
