"""A gradient that is written in pieces: the same bytes, whatever the order."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import encoder, wire_formats

TEMPLATES = {
  "one array": [np.zeros(1000, np.float32)],
  "several dtypes": [
    np.zeros((7, 11), np.float32),
    np.zeros(3, np.float64),
    np.zeros((0, 4), np.float32),
    np.zeros(130, jnp.bfloat16),
    np.zeros((), np.float16),
    np.zeros((5, 5), np.float32),
  ],
  "no numbers": [np.zeros(0, np.float32)],
}


def made(name):
  template = TEMPLATES[name]
  rng = np.random.default_rng(1)
  leaves = [
    jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)) for x in template
  ]
  one = encoder.Encoder(template, "float32")
  whole = np.full(one.place.nbytes, 255, np.uint8)
  assert one.write(leaves, whole)
  return one, leaves, whole


@pytest.mark.parametrize("nbytes", [1, 64, 200, 10**6])
@pytest.mark.parametrize(("parts", "begins"), [(1, 1), (2, 1), (3, 2), (5, 0)])
@pytest.mark.parametrize("name", ["one array", "several dtypes"])
def test_announced_bytes_are_written(name, parts, begins, nbytes):
  one, leaves, whole = made(name)
  out = np.full(one.place.nbytes, 255, np.uint8)
  packing = one.packing(leaves, out)
  cuts = one.place.cuts(parts)
  slices = [one.place.bytes_of(a, b) for a, b in itertools.pairwise(cuts)]
  first = slices[begins % parts][1]
  packing.begin_at(first)
  fronts = [packing.front(*each) for each in slices]
  assert not any(fronts)
  assert not packing.done
  while not packing.done:
    packing.go_on(nbytes)
    now = [packing.front(*each) for each in slices]
    assert all(a <= b for a, b in zip(fronts, now, strict=True))
    for (low, _), here in zip(slices, now, strict=True):
      np.testing.assert_array_equal(
        out[low : low + here], whole[low : low + here]
      )
    fronts = now
  assert fronts == [high - low for low, high in slices]
  np.testing.assert_array_equal(out, whole)
  packing.go_on(nbytes)
  assert packing.done


def test_the_slice_needed_first_is_written_first():
  one, leaves, _ = made("one array")
  out = np.zeros(one.place.nbytes, np.uint8)
  packing = one.packing(leaves, out)
  middle = one.place.bytes_of(0, one.place.cuts(2)[1])[1]
  packing.begin_at(middle)
  packing.go_on(64)
  packing.begin_at(0)  # Too late.
  packing.go_on(64)
  assert packing.front(middle, out.size) == 128
  assert packing.front(0, middle) == 0
  # Of what lies around the first byte, the front comes at the very end.
  assert packing.front(0, out.size) == 0


def test_an_empty_gradient_is_complete_at_once():
  one, leaves, whole = made("no numbers")
  packing = one.packing(leaves, np.zeros(one.place.nbytes, np.uint8))
  assert packing.done
  assert not whole.size
  packing.go_on(64)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 3, 5])
def test_nothing_is_written_of_a_gradient_that_is_not_finite(bad, where):
  one, leaves, _ = made("several dtypes")
  leaves[where] = leaves[where].reshape(-1).at[-1].set(bad)
  leaves[where] = leaves[where].reshape(
    TEMPLATES["several dtypes"][where].shape
  )
  out = np.zeros(one.place.nbytes, np.uint8)
  assert one.packing(leaves, out) is None
  assert not out.any()


def test_large_finite_numbers_are_finite():
  """Though their sum is not."""
  one = encoder.Encoder([np.zeros(64, np.float32)], "float32")
  big = jnp.full(64, 3e38, jnp.float32)
  assert one.packing([big], np.zeros(one.place.nbytes, np.uint8)) is not None


@pytest.mark.parametrize("wire", wire_formats.WIRES)
def test_only_exact_formats_can_be_cut(wire):
  one = encoder.Encoder([np.zeros(64, np.float32)], wire)
  assert one.can_pack == (wire == "float32")
  if not one.can_pack:
    with pytest.raises(ValueError, match="travels as it is"):
      one.packing([jnp.ones(64)], np.zeros(one.place.nbytes, np.uint8))
