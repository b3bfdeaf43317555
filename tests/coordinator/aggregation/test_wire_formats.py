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


def test_int8_is_off_by_half_a_step_at_most():
  numbers = np.random.default_rng(1).normal(size=3 * 4032).astype(np.float32)
  numbers[:4032] *= 1e-20
  numbers[-4032:] = 0
  found = there_and_back(wire_formats.Int8(), numbers)
  for start in range(0, numbers.size, 4032):
    block = slice(start, start + 4032)
    step = np.abs(numbers[block]).max() / 127
    assert np.abs(found[block] - numbers[block]).max() <= step * 0.5001
  assert wire_formats.Int8().nbytes(4032) == 4096


def test_int8_takes_the_smallest_and_the_largest_numbers():
  tiny = np.full(4032, 1e-45, np.float32)
  huge = np.linspace(-3e38, 3e38, 4032, dtype=np.float32)
  for numbers in (tiny, huge):
    found = there_and_back(wire_formats.Int8(), numbers)
    assert np.isfinite(found).all()
  assert np.abs(found - huge).max() <= 3e38 / 127


def test_only_float32_is_shortened():
  for kind in wire_formats.WIRES:
    for dtype in (np.float64, jnp.bfloat16, np.int32):
      assert isinstance(
        wire_formats.codec(kind, np.dtype(dtype)), wire_formats.Plain
      )


def test_an_unknown_wire_is_refused():
  with pytest.raises(ValueError, match=r"wire must be one of .* got 'fp8'"):
    wire_formats.codec("fp8", np.dtype(np.float32))
