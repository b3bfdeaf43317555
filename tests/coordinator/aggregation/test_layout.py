"""Leaves in a flat buffer, and where it may be cut."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import wire_formats

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "bool")

leaves_of = st.lists(
  st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), max_size=3),
  ),
  min_size=1,
  max_size=8,
)


def specs(drawn):
  import jax
  import jax.numpy as jnp

  return [
    jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    for dtype, shape in drawn
  ]


@given(leaves_of, st.sampled_from(wire_formats.WIRES), st.integers(1, 7))
def test_slices_cover_every_byte_once(drawn, kind, parts):
  layout = layouts.layout(specs(drawn), kind)
  cuts = layout.cuts(parts)
  assert cuts[0] == 0
  assert cuts[-1] == layout.elements
  assert list(cuts) == sorted(cuts)
  covered = np.zeros(layout.nbytes, int)
  for start, stop in itertools.pairwise(cuts):
    first, last = layout.bytes_of(start, stop)
    counted = 0
    for chunk in layout.chunks(start, stop):
      covered[first:last][chunk.bytes] += 1
      counted += chunk.size
      size = chunk.codec.nbytes(chunk.size)
      assert chunk.bytes.stop - chunk.bytes.start == size
      assert chunk.bytes.stop <= last - first
    assert counted == stop - start
  assert covered.max(initial=1) == 1
  # Bytes outside of all slices pad a group to a multiple of 64 bytes.
  assert (covered == 0).sum() < 64 * (len(layout.groups) + 1)


@given(leaves_of, st.sampled_from(("float32", "bfloat16")))
def test_leaves_do_not_overlap_and_begin_aligned(drawn, kind):
  layout = layouts.layout(specs(drawn), kind)
  taken = np.zeros(layout.nbytes, int)
  for leaf in layout.leaves:
    start, stop = leaf.begin, leaf.end
    itemsize = leaf.codec.nbytes(1)
    assert start % min(64, 16 * itemsize) == 0
    assert stop - start == leaf.size * itemsize
    taken[start:stop] += 1
  assert taken.max(initial=0) <= 1
