"""The mean of gradients in replica order, however they are cut."""

import jax.numpy as jnp
import numpy as np
import pytest
from averages import average

from optax_dist.coordinator.aggregation import (
  encoder,
  layout,
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
  found = []
  for i in range(members):
    rng = np.random.default_rng(i)
    found.append(
      [
        np.asarray(rng.normal(size=shape) * 10.0**i).astype(jnp.dtype(dtype))
        for shape, dtype in SHAPES
      ]
    )
  return found


def averaged(all_leaves, kind, slices, weights=None, counts=None):
  """The mean by way of buffers that are cut into slices."""
  made = encoder.Encoder(all_leaves[0], kind)
  buffers = []
  for leaves in all_leaves:
    buffer = np.zeros(made.place.nbytes, np.uint8)
    assert made.write(leaves, buffer)
    buffers.append(buffer)
  return made.read(average(made, buffers, weights, counts, slices))


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
def test_the_mean_is_exact_and_does_not_depend_on_the_cuts(members, parts):
  found = averaged(gradients(members), "float32", parts)
  for got, want in zip(found, by_hand(gradients(members)), strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_weights_multiply_and_the_count_divides():
  weights = [1.0, 0.5, 0.25]
  found = averaged(gradients(3), "float32", 3, weights, counts=[2, 1, 2])
  wanted = by_hand(gradients(3), weights, count=5)
  for got, want in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_bfloat16_rounds_once_on_the_way_in_and_once_out(parts):
  found = averaged(gradients(3), "bfloat16", parts)
  short = [
    [
      g.astype(jnp.bfloat16).astype(np.float32) if g.dtype == np.float32 else g
      for g in leaves
    ]
    for leaves in gradients(3)
  ]
  for got, want in zip(found, by_hand(short), strict=True):
    if want.dtype == np.float32:
      want = want.astype(jnp.bfloat16)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", wire_formats.WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [10, 3 * layout.CHUNK])
def test_gradients_that_are_not_finite_are_reported(kind, bad, size):
  leaves = [np.ones(size, np.float32), np.ones(3, np.float64)]
  place = layout.layout(leaves, kind)
  buffer = np.zeros(place.nbytes, np.uint8)
  assert means.write(leaves, place, buffer)
  for leaf in leaves:
    leaf[-1] = bad
    assert not means.write(leaves, place, buffer)
    leaf[-1] = 1.0


@pytest.mark.parametrize("size", [10, 2**20 + 10])
def test_a_mean_in_bfloat16_keeps_numbers_below_the_smallest_normal_one(size):
  leaves = [np.full(size, x, np.float32) for x in (1e-39, 3e-39)]
  (found,) = averaged([[leaf] for leaf in leaves], "bfloat16", 1)
  low, high = (leaf.astype(jnp.bfloat16).astype(np.float32) for leaf in leaves)
  expected = ((low + high) / np.float32(2)).astype(jnp.bfloat16)
  assert expected.all()
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [10, 3 * layout.CHUNK])
@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_a_number_that_bfloat16_rounds_to_infinity_is_reported(size, made):
  leaf = np.ones(size, np.float32)
  place = layout.layout([leaf], "bfloat16")
  buffer = np.zeros(place.nbytes, np.uint8)
  leaf[-1] = 3.389e38
  assert means.write([made(leaf)], place, buffer)
  leaf[-1] = 3.4e38
  assert not means.write([made(leaf)], place, buffer)


def test_numbers_whose_sum_overflows_are_finite():
  leaves = [np.full(100, 3e38, np.float32)]
  place = layout.layout(leaves)
  assert means.write(leaves, place, np.zeros(place.nbytes, np.uint8))
