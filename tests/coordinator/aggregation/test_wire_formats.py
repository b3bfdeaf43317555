"""Numbers as bytes and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from averages import average
from compressing import received

from optax_dist import compression
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means, wire_formats

BLOCK = wire_formats.Int8.quantum


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
  result = there_and_back(codec, numbers.astype(codec.work))
  np.testing.assert_array_equal(result.astype(numbers.dtype), numbers)
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
    result = there_and_back(codec, numbers)
  np.testing.assert_array_equal(result.view(np.uint32)[real], expected[real])
  assert np.isnan(result[~real]).all()


def test_only_float32_is_compressed():
  for kind in wire_formats.WIRES:
    for dtype in (np.float64, jnp.bfloat16, np.int32):
      codec = wire_formats.codec(kind, np.dtype(dtype))
      assert codec.nbytes(64) == 64 * np.dtype(dtype).itemsize


def test_an_unknown_wire_is_refused():
  with pytest.raises(ValueError, match=r"wire must be one of .* got 'fp8'"):
    wire_formats.codec("fp8", np.dtype(np.float32))


def in_int8(numbers):
  codec = wire_formats.codec("int8", numbers.dtype)
  with np.errstate(all="ignore"):
    return there_and_back(codec, numbers)


def normal(size, seed=0):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_int8_is_the_method_of_compression_in_a_quarter_of_the_bytes():
  numbers = normal(3 * BLOCK)
  method = compression.quantize(8, block=BLOCK)
  expected = received(method, jnp.asarray(numbers))
  result = in_int8(numbers)
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
  codec = wire_formats.codec("int8", numbers.dtype)
  assert 4 * numbers.size / codec.nbytes(numbers.size) > 3.9


def test_int8_error_is_at_most_half_a_step_of_its_block():
  numbers = normal(4 * BLOCK, seed=1)
  numbers[:BLOCK] *= 1e-20
  numbers[BLOCK : 2 * BLOCK] = np.linspace(-3e38, 3e38, BLOCK)
  numbers[-BLOCK:] = 0
  off = np.abs(in_int8(numbers) - numbers).reshape(-1, BLOCK)
  step = np.abs(numbers).reshape(-1, BLOCK).max(1, keepdims=True) / 127
  assert np.all(off <= step * 0.5001)


def test_int8_of_numbers_too_small_for_a_scale_is_finite():
  assert np.isfinite(in_int8(np.full(BLOCK, 1e-45, np.float32))).all()


def test_slices_of_int8_are_averaged_as_the_whole_is():
  layout = layouts.layout([np.zeros(5 * BLOCK, np.float32)], "int8")
  gradients = []
  for seed in range(2):
    raw = np.zeros(layout.nbytes, np.uint8)
    assert means.write([normal(5 * BLOCK, seed)], layout, raw)
    gradients.append(raw)
  whole = average(layout, gradients, [1.0, 0.5])
  assert average(layout, gradients, [1.0, 0.5], slices=3) == whole


@pytest.mark.parametrize("wire", wire_formats.WIRES)
def test_zero_bytes_decode_to_zeros(wire):
  leaves = [np.ones(9000, np.float32), np.ones(3, np.float16)]
  layout = layouts.layout(leaves, wire)
  for leaf in means.read(layout, np.zeros(layout.nbytes, np.uint8)):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
