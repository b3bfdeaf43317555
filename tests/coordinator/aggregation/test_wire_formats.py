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
  ties = (np.arange(64, dtype=np.uint32) << 15) + 0x3F800000
  numbers = np.concatenate([some_numbers(4096), ties.view(np.float32)])
  expected = numbers.astype(jnp.bfloat16).astype(np.float32)
  found = there_and_back(wire_formats.BFloat16(), numbers)
  np.testing.assert_array_equal(found, expected)


def test_only_float32_is_shortened():
  for kind in wire_formats.WIRES:
    for dtype in (np.float64, jnp.bfloat16, np.int32):
      assert isinstance(
        wire_formats.codec(kind, np.dtype(dtype)), wire_formats.Plain
      )


def test_an_unknown_wire_is_refused():
  with pytest.raises(ValueError, match=r"wire must be one of .* got 'fp8'"):
    wire_formats.codec("fp8", np.dtype(np.float32))
