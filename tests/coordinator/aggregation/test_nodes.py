"""Micro-batches add up to the same bits, whoever computes them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import ledger
from optax_dist.coordinator.aggregation import (
  layout as layouts,
)
from optax_dist.coordinator.aggregation import (
  means,
  nodes,
  reducer,
  wire_formats,
)
from optax_dist.coordinator.protocol import entries
from optax_dist.ledger import spans as sp

BFLOAT16 = jnp.dtype(jnp.bfloat16)
TEMPLATE = [
  np.zeros((300, 401), np.float32),
  np.zeros(7, np.float64),
  np.zeros(33, BFLOAT16),
  np.zeros(5, np.float16),
]
DENORMAL = 1e-40


def make_summing(layout, slots):
  """Adds up micro-batches, in memory of this process."""
  return nodes.Summing(
    layout, slots, lambda: memoryview(bytearray(layout.nbytes))
  )


def gradient(slot, template=TEMPLATE):
  """Numbers whose sum depends on the order, some of them denormal."""
  rng = np.random.default_rng(slot)
  result = []
  for like in template:
    numbers = rng.normal(size=like.shape) * 10.0 ** rng.integers(-3, 4)
    tiny = rng.random(like.shape) < 0.2
    result.append(
      np.where(tiny, numbers * DENORMAL, numbers).astype(like.dtype)
    )
  return result


@pytest.mark.parametrize("wire", wire_formats.WIRES)
@pytest.mark.parametrize("slots", [2, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_sum_of_the_largest_numbers_is_finite(dtype, slots, wire):
  dtype = jnp.dtype(dtype)
  large = float(jnp.finfo(dtype).max)
  layout = layouts.layout([np.zeros(300, dtype)], wire)
  summing = make_summing(layout, slots)
  encode = lambda slot, size: summing.encode(
    slot, [np.full(300, size).astype(dtype)]
  )
  sizes = large / 1.01 ** np.arange(600)
  size = next(size for size in sizes if encode(0, size) is not None)
  assert size >= 0.85 * large / slots
  total = encode(0, size)
  for slot in range(1, slots):
    total = summing.add(total, encode(slot, size))
  (result,) = means.read(layout, total.arrays[0])
  np.testing.assert_allclose(result.astype(np.float64), slots * size, rtol=0.03)


def by_hand(slots, wire, start, stop):
  """The node's arrays in NumPy, each sum rounded as it is sent."""
  if stop - start == 1:
    leaves = gradient(start)
    if wire == "bfloat16":
      leaves[0] = leaves[0].astype(BFLOAT16)
    return leaves
  middle = start + (1 << (stop - start - 1).bit_length() - 1)
  left = by_hand(slots, wire, start, middle)
  right = by_hand(slots, wire, middle, stop)
  work = lambda x: x.astype(np.float32) if x.dtype.itemsize < 4 else x
  pairs = zip(left, right, strict=True)
  return [(work(a) + work(b)).astype(a.dtype) for a, b in pairs]


def decoded(layout, raw):
  result = []
  for leaf in layout.leaves:
    numbers = raw[leaf.begin : leaf.end].view(leaf.codec.stored)
    result.append(numbers.reshape(leaf.shape))
  return result


def same_bits(found, want):
  for a, b in zip(found, want, strict=True):
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def summed(summing, slots):
  parts = [summing.encode(slot, gradient(slot)) for slot in slots]
  total = parts[0]
  for part in parts[1:]:
    total = summing.add(total, part)
  return total


def mean(layout, slots, sums):
  """The mean of the sums of several replicas, as the coordinator averages them."""
  data = ledger.Batches(2 * slots, 2 * slots, micro_batch=2, deterministic=True)
  parts = [
    entries.Part(
      i,
      i,
      0,
      0,
      0,
      sp.size(total.spans),
      1.0,
      tuple((2 * a, 2 * b) for a, b in total.spans),
    )
    for i, total in enumerate(sums)
  ]
  gradients = [b"".join(a.tobytes() for a in total.arrays) for total in sums]
  return reducer.Reducer(layout, data).whole(parts, gradients)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_sum_has_the_bits_of_the_tree(wire):
  layout = layouts.layout(TEMPLATE, wire)
  summing = make_summing(layout, slots=7)
  for order in itertools.permutations([2, 3, 4, 5]):
    total = summed(summing, order)
    assert total.spans == ((2, 4), (4, 6))
    for span, raw in zip(total.spans, total.arrays, strict=True):
      same_bits(decoded(layout, raw), by_hand(7, wire, *span))
  whole = summed(summing, [6, 0, 5, 1, 4, 2, 3])
  assert whole.spans == ((0, 7),)
  same_bits(decoded(layout, whole.arrays[0]), by_hand(7, wire, 0, 7))


def test_denormals_are_not_lost():
  template = [np.zeros(64, np.float32)]
  layout = layouts.layout(template)
  summing = make_summing(layout, slots=2)
  least = [np.full(64, 3e-45, np.float32)]
  total = summing.add(summing.encode(0, least), summing.encode(1, least))
  raw = mean(layout, 2, [total])
  np.testing.assert_array_equal(means.read(layout, raw)[0], least[0])


@pytest.mark.parametrize("wire", wire_formats.WIRES)
def test_equal_gradients_have_equal_bytes(wire):
  """Bytes between leaves are equal, too, so that digests can be compared."""
  summing = make_summing(layouts.layout(TEMPLATE, wire), slots=2)
  np.full(1 << 20, 255, np.uint8)  # Likely the memory that is used next.
  first = summing.encode(0, gradient(0)).arrays[0].copy()
  assert summing.encode(0, gradient(0)).arrays[0].tobytes() == first.tobytes()


def test_sum_with_missing_slots_is_refused():
  layout = layouts.layout(TEMPLATE)
  total = summed(make_summing(layout, slots=3), [0, 1])
  with pytest.raises(ValueError, match="don't make up"):
    mean(layout, 3, [total])
