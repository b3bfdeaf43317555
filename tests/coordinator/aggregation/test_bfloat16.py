"""XLA's and NumPy's bfloat16 agree to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import bfloat16, wire_formats


def some_numbers(size, seed):
  rng = np.random.default_rng(seed)
  scale = 10.0 ** rng.uniform(-30, 30, size)
  return (rng.normal(size=size) * scale).astype(np.float32)


def encoded(numbers):
  raw = np.empty(2 * numbers.size, np.uint8)
  wire_formats.BFloat16().encode(numbers, raw)
  return raw.view(np.uint16)


def test_shorten_is_the_wire_s_rounding():
  numbers = some_numbers(10_000, 0)
  bits, finite = bfloat16.shorten(jnp.asarray(numbers.reshape(100, 100)))
  assert finite
  np.testing.assert_array_equal(bits, encoded(numbers))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_shorten_finds_what_is_not_finite_on_the_wire(bad):
  # 3.4e38 is finite, and rounds to infinity.
  numbers = np.ones(100, np.float32)
  numbers[57] = bad
  assert not bfloat16.shorten(jnp.asarray(numbers))[1]
  assert bfloat16.shorten(jnp.zeros((0,)))[1]


@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_mean_is_numpy_s_in_the_same_order(members):
  parts = [encoded(some_numbers(bfloat16.PIECE, i)) for i in range(members)]
  out = np.empty(bfloat16.PIECE, np.uint16)
  bfloat16.mean(parts, members, out)
  codec = wire_formats.BFloat16()
  total = codec.decode(parts[0].view(np.uint8)).copy()
  for part in parts[1:]:
    total += codec.decode(part.view(np.uint8))
  total /= np.float32(members)
  np.testing.assert_array_equal(out, encoded(total))
