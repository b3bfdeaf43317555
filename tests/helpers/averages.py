"""The mean of encoded gradients, as one member that averages all of it makes it."""

import itertools

import numpy as np

from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.aggregation.reducer import Reducer
from optax_dist.coordinator.protocol import entries


def average(encoder, gradients, weights=None, counts=None, slices=1):
  """The bytes of the mean; its residual is added to the next one.

  Args:
    encoder: of the gradients.
    gradients: the bytes of each.
    weights: of each; 1.0 by default.
    counts: how many gradients are summed in each; 1 by default.
    slices: into how many the work is cut.
  """
  reducer = Reducer(encoder)
  ones = [1] * len(gradients)
  parts = [
    entries.Part(i, i, 0, 0, 0, count, float(weight))
    for i, (count, weight) in enumerate(
      zip(counts or ones, weights or ones, strict=True)
    )
  ]
  place, mean_place = reducer.place, reducer.mean_place
  out = np.zeros(mean_place.nbytes, np.uint8)
  for start, stop in itertools.pairwise(place.cuts(slices)):
    low, high = place.bytes_of(start, stop)
    first, last = mean_place.bytes_of(start, stop)
    rows = [np.frombuffer(raw, np.uint8)[low:high] for raw in gradients]
    error = reducer.residual(start, stop)
    reducer.slice(
      reducer.sum_of(parts), rows, start, stop, out[first:last], error
    )
    if error is not None:
      reducer.feedback.keep(error, start)
  return out.tobytes()


def decoded(encoder, raw):
  """An encoded gradient as the other replicas decode it: float32, or unchanged."""
  place = encoder.place
  return [
    array.astype(place.groups[leaf.group].codec.work, copy=False)
    for leaf, array in zip(place.leaves, means.read(place, raw), strict=True)
  ]
