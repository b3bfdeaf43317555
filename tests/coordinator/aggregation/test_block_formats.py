"""Numbers in few bits and back: each format against its equation."""

import jax.numpy as jnp
import numpy as np
import pytest
from averages import average, decoded
from compressing import received

from optax_dist import compression
from optax_dist.coordinator.aggregation import block_formats, encoder
from optax_dist.coordinator.aggregation import wire_formats as wires

N = block_formats.NUMBERS
CODECS = {name: wires.codec(name, np.dtype("f4")) for name in wires.WIRES[2:]}


def _numbers(blocks=3, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=blocks * N).astype(np.float32)


def _there_and_back(name, numbers):
  codec = CODECS[name]
  raw = np.full(codec.nbytes(numbers.size), 255, np.uint8)
  codec.encode(numbers, raw)
  before = raw.copy()
  found = np.array(codec.decode(raw))
  np.testing.assert_array_equal(raw, before)
  return found


def test_all_wire_formats_are_listed():
  assert set(CODECS) == {"int8", "int4", "int2", "top_k"}


@pytest.mark.parametrize(
  ("name", "method"),
  [
    ("int8", compression.quantize(8, block=N)),
    ("int4", compression.quantize(4, block=N)),
    ("int2", compression.quantize(2, block=N)),
  ],
)
def test_block_formats_are_the_methods_of_compression(name, method):
  numbers = _numbers()
  expected = received(method, jnp.asarray(numbers))
  np.testing.assert_allclose(
    _there_and_back(name, numbers), expected, rtol=1e-5, atol=1e-6
  )


def test_int8_is_off_by_half_a_step_at_most():
  numbers = np.random.default_rng(1).normal(size=3 * N).astype(np.float32)
  numbers[:N] *= 1e-20
  numbers[-N:] = 0
  found = _there_and_back("int8", numbers)
  for start in range(0, numbers.size, N):
    block = slice(start, start + N)
    step = np.abs(numbers[block]).max() / 127
    assert np.abs(found[block] - numbers[block]).max() <= step * 0.5001


def test_int8_is_as_close_for_the_largest_numbers():
  huge = np.linspace(-3e38, 3e38, N, dtype=np.float32)
  found = _there_and_back("int8", huge)
  assert np.abs(found - huge).max() <= 3e38 / 127


def test_top_k_keeps_the_largest_in_two_bits():
  numbers = _numbers()
  found = _there_and_back("top_k", numbers).reshape(-1, N)
  for row, got in zip(numbers.reshape(-1, N), found, strict=True):
    at = np.sort(np.argsort(np.abs(row))[-121:])
    np.testing.assert_array_equal(np.nonzero(got)[0], at)
    scale = np.abs(row).max()
    expected = (np.rint((row[at] / scale + 1) * 1.5) / 1.5 - 1) * scale
    np.testing.assert_allclose(got[at], expected, rtol=1e-5)


def test_top_k_takes_any_positions():
  """At both ends, side by side, and where all are alike."""
  numbers = np.zeros((3, N), np.float32)
  numbers[0, :121] = 1.0
  numbers[1, -121:] = -1.0
  numbers[2] = 1.0
  found = _there_and_back("top_k", numbers.reshape(-1)).reshape(-1, N)
  np.testing.assert_allclose(found[:2], numbers[:2], rtol=1e-6)
  assert np.count_nonzero(found[2]) == 121


def test_bytes_are_those_of_the_bits():
  whole = 4 * N
  fewer = {name: whole / codec.nbytes(N) for name, codec in CODECS.items()}
  assert fewer["int8"] > 3.9
  assert fewer["int4"] > 7.9
  assert fewer["int2"] > 15.7
  assert fewer["top_k"] >= 112


@pytest.mark.parametrize("name", CODECS)
def test_zeros_tiny_and_huge_numbers_come_through(name):
  zeros, tiny = np.zeros(N, np.float32), np.full(N, 1e-45, np.float32)
  np.testing.assert_array_equal(_there_and_back(name, zeros), zeros)
  huge = np.linspace(-3e38, 3e38, N, dtype=np.float32)
  for numbers in (tiny, huge):
    with np.errstate(all="ignore"):
      found = _there_and_back(name, numbers)
    assert np.isfinite(found).all()


def test_top_k_has_no_place_for_zeros():
  numbers = np.zeros(N, np.float32)
  numbers[[3, 70, 71]] = 1.5, -1.5, 0.5
  np.testing.assert_allclose(_there_and_back("top_k", numbers), numbers, 1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_no_more_is_left_out_than_there_is(name):
  numbers = _numbers(seed=5)
  left = np.sum((numbers - _there_and_back(name, numbers)) ** 2)
  assert left < np.sum(numbers**2)


@pytest.mark.parametrize("name", CODECS)
def test_with_feedback_all_is_sent_in_the_end(name):
  """A constant gradient: what is not sent yet stays bounded."""
  made = encoder.Encoder([np.zeros(N + 100, np.float32)], name)
  gradient = _numbers(2, seed=2)[: N + 100]
  raw = np.zeros(made.place.nbytes, np.uint8)
  total, steps = np.zeros(gradient.size), 150
  for _ in range(steps):
    assert made.write([gradient], raw)
    made.settle(0, True)
    total += decoded(made, raw)[0]
  off = np.abs(total / steps - gradient)
  once = _there_and_back(name, _numbers(2, seed=2)) - _numbers(2, seed=2)
  assert off.max() < 0.5 * np.abs(once).max()


@pytest.mark.parametrize("name", CODECS)
def test_slices_are_averaged_as_the_whole_is(name):
  size = 3 * N
  made = encoder.Encoder([np.zeros(size, np.float32)], name)
  gradients = []
  for seed in range(2):
    raw = np.zeros(made.place.nbytes, np.uint8)
    made.write([_numbers(seed=seed)], raw)
    gradients.append(raw)
  weights = [1.0, 0.5]
  whole = average(made, gradients, weights)
  made = encoder.Encoder([np.zeros(size, np.float32)], name)
  assert average(made, gradients, weights, slices=2) == whole
