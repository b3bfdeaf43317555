"""The mean of encoded gradients, as one member that averages all of it makes it."""

import numpy as np

from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.aggregation.reducer import Reducer
from optax_dist.coordinator.protocol import entries


def average(encoder, gradients, weights=None):
  """The bytes of the mean; its residual is added to the next one.

  Args:
    encoder: of the gradients.
    gradients: the bytes of each.
    weights: of each; 1.0 by default.
  """
  reducer = Reducer(encoder)
  parts = [
    entries.Part(i, i, 0, 0, 0, 1, weight)
    for i, weight in enumerate(weights or [1.0] * len(gradients))
  ]
  rows = [np.frombuffer(raw, np.uint8) for raw in gradients]
  whole = reducer.place.elements
  out = np.zeros(reducer.mean_place.nbytes, np.uint8)
  error = reducer.owed(0, whole)
  reducer.slice(parts, rows, 0, whole, out, error)
  if error is not None:
    reducer.feedback.keep(0, error)
  return out.tobytes()


def decoded(encoder, raw):
  """An encoded gradient as the other replicas decode it: float32, or unchanged."""
  place = encoder.place
  return [
    array.astype(place.groups[leaf.group].codec.work, copy=False)
    for leaf, array in zip(place.leaves, means.read(place, raw), strict=True)
  ]
