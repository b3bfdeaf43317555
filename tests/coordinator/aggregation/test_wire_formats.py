"""Numbers as bytes and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import wire_formats


def some_numbers(size, seed=0):
  rng = np.random.default_rng(seed)
  scale = 10.0 ** rng.uniform(-30, 30, size)
  return (rng.normal(size=size) * scale).astype(np.float32)


def there_and_back(codec, numbers):
  raw = np.empty(codec.nbytes(numbers.size), np.uint8)
  codec.encode(numbers, raw)
  return np.array(codec.decode(raw))


@pytest.mark.parametrize(
  "dtype", ["float32", "float64", "float16", "bfloat16", "int32"]
)
def test_plain_numbers_are_unchanged(dtype):
  numbers = (np.arange(96) - 40).astype(jnp.dtype(dtype))
  codec = wire_formats.codec("float32", numbers.dtype)
  found = there_and_back(codec, numbers.astype(codec.work))
  np.testing.assert_array_equal(found.astype(numbers.dtype), numbers)
  assert codec.nbytes(96) == 96 * numbers.dtype.itemsize


def test_bfloat16_rounds_to_nearest_and_ties_to_even():
  """Every bfloat16, and what lies between it and the next one."""
  halves = np.arange(1 << 16, dtype=np.uint32)
  between = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
  bits = ((halves << 16)[:, None] + between).reshape(-1)
  up = (bits & 0xFFFF > 0x8000) | ((bits & 0x1FFFF) == 0x18000)
  expected = (bits >> 16) + up << 16
  numbers = bits.view(np.float32)
  real = ~np.isnan(numbers)
  codec = wire_formats.codec("bfloat16", numbers.dtype)
  with np.errstate(invalid="ignore"):
    found = there_and_back(codec, numbers)
  np.testing.assert_array_equal(found.view(np.uint32)[real], expected[real])
  assert np.isnan(found[~real]).all()


def test_only_float32_is_shortened():
  for kind in wire_formats.WIRES:
    for dtype in (np.float64, jnp.bfloat16, np.int32):
      codec = wire_formats.codec(kind, np.dtype(dtype))
      assert codec.nbytes(64) == 64 * np.dtype(dtype).itemsize


def test_an_unknown_wire_is_refused():
  with pytest.raises(ValueError, match=r"wire must be one of .* got 'fp8'"):
    wire_formats.codec("fp8", np.dtype(np.float32))
