"""Gradients as bytes, and their mean in replica order, however they are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from averages import average

from optax_dist.coordinator.aggregation import (
  layout as layouts,
)
from optax_dist.coordinator.aggregation import (
  means,
  wire_formats,
)

SHAPES = [
  ((300, 400), "float32"),
  ((7,), "float32"),
  ((33, 5), "float64"),
  ((1000,), "bfloat16"),
  ((), "float32"),
  ((0, 3), "float32"),
]


def gradients(members):
  result = []
  for i in range(members):
    rng = np.random.default_rng(i)
    result.append(
      [
        np.asarray(rng.normal(size=shape) * 10.0**i).astype(jnp.dtype(dtype))
        for shape, dtype in SHAPES
      ]
    )
  return result


def averaged(all_leaves, kind, slices, weights=None, counts=None):
  """The mean by way of buffers that are cut into slices."""
  layout = layouts.layout(all_leaves[0], kind)
  buffers = []
  for leaves in all_leaves:
    buffer = np.zeros(layout.nbytes, np.uint8)
    assert means.write(leaves, layout, buffer)
    buffers.append(buffer)
  return means.read(layout, average(layout, buffers, weights, counts, slices))


def by_hand(all_leaves, weights=None, count=None):
  """The same, leaf by leaf."""
  weights = weights or [1.0] * len(all_leaves)
  means = []
  for leaves in zip(*all_leaves, strict=True):
    work = np.float64 if leaves[0].dtype == np.float64 else np.float32
    total = leaves[0].astype(work) * work(weights[0])
    for leaf, weight in zip(leaves[1:], weights[1:], strict=True):
      total = total + leaf.astype(work) * work(weight)
    mean = total / work(count or len(all_leaves))
    means.append(mean.astype(leaves[0].dtype))
  return means


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_mean_is_exact_however_it_is_split(members, parts):
  result = averaged(gradients(members), "float32", parts)
  for got, want in zip(result, by_hand(gradients(members)), strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_weights_multiply_and_the_count_divides():
  weights = [1.0, 0.5, 0.25]
  result = averaged(gradients(3), "float32", 3, weights, counts=[2, 1, 2])
  wanted = by_hand(gradients(3), weights, count=5)
  for got, want in zip(result, wanted, strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_bfloat16_rounds_once_on_the_way_in_and_once_out(parts):
  result = averaged(gradients(3), "bfloat16", parts)
  short = [
    [
      g.astype(jnp.bfloat16).astype(np.float32) if g.dtype == np.float32 else g
      for g in leaves
    ]
    for leaves in gradients(3)
  ]
  for got, want in zip(result, by_hand(short), strict=True):
    if want.dtype == np.float32:
      want = want.astype(jnp.bfloat16)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("wire", wire_formats.WIRES)
def test_the_bytes_of_a_leaf_do_not_depend_on_its_neighbors(wire):
  """Processes of a replica have one shard alike, and others beside it."""
  shard = np.random.default_rng(0).normal(size=700).astype(np.float32)
  result = []
  for size in (3, 5000):
    leaves = [np.full(size, 100.0, np.float32), shard]
    layout = layouts.layout(leaves, wire)
    raw = np.zeros(layout.nbytes, np.uint8)
    assert means.write(leaves, layout, raw)
    start, stop = layout.leaves[1].begin, layout.leaves[1].end
    result.append(
      (raw[start:stop].tobytes(), means.read(layout, raw)[1].tobytes())
    )
  assert result[0] == result[1]


@pytest.mark.parametrize("kind", wire_formats.WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [10, 3 * layouts.CHUNK])
def test_gradients_that_are_not_finite_are_reported(kind, bad, size):
  leaves = [np.ones(size, np.float32), np.ones(3, np.float64)]
  layout = layouts.layout(leaves, kind)
  buffer = np.zeros(layout.nbytes, np.uint8)
  assert means.write(leaves, layout, buffer)
  for leaf in leaves:
    leaf[-1] = bad
    assert not means.write(leaves, layout, buffer)
    leaf[-1] = 1.0


@pytest.mark.parametrize("size", [10, 2**20 + 10])
def test_a_mean_in_bfloat16_keeps_numbers_below_the_smallest_normal_one(size):
  leaves = [np.full(size, x, np.float32) for x in (1e-39, 3e-39)]
  (result,) = averaged([[leaf] for leaf in leaves], "bfloat16", 1)
  low, high = (leaf.astype(jnp.bfloat16).astype(np.float32) for leaf in leaves)
  expected = ((low + high) / np.float32(2)).astype(jnp.bfloat16)
  assert expected.all()
  np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [10, 3 * layouts.CHUNK])
@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_a_number_that_bfloat16_rounds_to_infinity_is_reported(size, made):
  leaf = np.ones(size, np.float32)
  layout = layouts.layout([leaf], "bfloat16")
  buffer = np.zeros(layout.nbytes, np.uint8)
  # The largest bfloat16 is 3.3895e38; half a step above it, numbers round to it.
  for size, is_sent in ((3.389e38, True), (3.395e38, True), (3.397e38, False)):
    for leaf[-1] in (size, -size):
      sent = means.write([made(leaf)], layout, buffer)
      assert (sent is not None) == is_sent


DTYPES = [
  *[(wire, "float32") for wire in wire_formats.WIRES],
  *[("float32", dtype) for dtype in ("float64", "complex64", "float16")],
  *[("float32", dtype) for dtype in ("bfloat16", "float8_e4m3fn")],
]


@pytest.mark.parametrize(("wire", "dtype"), DTYPES)
@pytest.mark.parametrize("terms", [1, 2, 3, 7, 64])
def test_the_mean_of_the_largest_numbers_is_finite(wire, dtype, terms):
  dtype = jnp.dtype(dtype)
  large = float(jnp.finfo(dtype).max)
  layout = layouts.layout([np.zeros(300, dtype)], wire)
  out, counted = np.zeros(layout.nbytes, np.uint8), []
  for size in large / 1.01 ** np.arange(600):
    leaf = np.full(300, -size).astype(dtype)
    if means.write([leaf], layout.bounded(terms), out) is not None:
      counted.append(size)
      (mean,) = means.read(layout, average(layout, [out] * terms))
      np.testing.assert_allclose(mean, leaf, rtol=0.02)
      break
  # No smaller ones than the sum needs.
  assert counted[0] >= 0.97 * large / terms


def numbers(seed, size=5000):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def placed(leaves, wire="float32", terms=1):
  """The parts of a gradient that stays in place, and its buffer."""
  layout = layouts.layout(leaves, wire).bounded(terms)
  out = np.full(layout.nbytes, 255, np.uint8)
  parts = means.write(leaves, layout, out, in_place=True)
  return layout, parts, out


def test_gradient_sent_in_place_has_the_bytes_of_a_copy(monkeypatch):
  monkeypatch.setattr(means, "_IN_PLACE", 200)
  leaves = [
    jnp.asarray(numbers(0, 77)).reshape(7, 11),
    jnp.asarray(numbers(1, 3)),
    jnp.zeros((0, 4)),
    jnp.asarray(numbers(2, 130)).astype(jnp.bfloat16),
    jnp.float16(4),
    jnp.arange(64, dtype=jnp.int32),
    jnp.asarray(numbers(3, 128)),
  ]
  layout, parts, out = placed(leaves)
  for each in parts[::2]:  # What does not stay is in the buffer.
    assert np.shares_memory(np.frombuffer(each, np.uint8), out) or not each
  raw = np.frombuffer(b"".join(parts), np.uint8)
  assert raw.size == layout.nbytes
  for got, leaf in zip(means.read(layout, raw), leaves, strict=True):
    np.testing.assert_array_equal(got, leaf)
  where = {np.frombuffer(part, np.uint8).ctypes.data for part in parts if part}
  stays = [leaf.unsafe_buffer_pointer() in where for leaf in leaves]
  assert stays == [True, False, False, True, False, True, True]


def test_a_donated_array_that_is_still_sent_keeps_its_numbers():
  leaf = jax.jit(lambda x: x + 1)(jnp.zeros(20_000))
  _, parts, _ = placed([leaf])
  jax.jit(lambda x: x + 1, donate_argnums=0)(leaf).block_until_ready()
  del leaf
  jax.jit(lambda x: x + 5)(jnp.zeros(20_000)).block_until_ready()
  np.testing.assert_array_equal(np.frombuffer(parts[1], np.float32), 1.0)


@pytest.mark.parametrize(
  ("kind", "wire"),
  [
    # NumPy's arrays may be written to after an interrupted step.
    (np.asarray, "float32"),
    (jnp.asarray, "bfloat16"),
    (jnp.asarray, "int8"),
  ],
)
def test_mutable_or_compressed_gradients_are_copied(kind, wire):
  _, parts, out = placed([kind(numbers(0, 20_000))], wire)
  (part,) = parts
  assert np.shares_memory(np.frombuffer(part, np.uint8), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_numbers_in_place_are_checked(bad, where):
  leaves = [jnp.zeros(20_000), jnp.zeros(5)]
  leaves[where] = leaves[where].at[-1].set(bad)
  assert placed(leaves)[1] is None
  large = jnp.full(20_000, 3e38)
  assert placed([large])[1] is not None
  assert placed([large], terms=2)[1] is None


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_bytes_of_another_model_are_refused(wire):
  layout = layouts.layout([numbers(0)], wire)
  with pytest.raises(ValueError, match=r"mean of this model has .* got 4"):
    means.read(layout, b"1234")
