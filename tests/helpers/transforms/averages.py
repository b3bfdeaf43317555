"""The mean of encoded gradients, as one member that averages all of it makes it."""

import itertools

import numpy as np

from optax_dist.coordinator.aggregation.reducer import Reducer
from optax_dist.coordinator.protocol import entries


def average(layout, gradients, weights=None, counts=None, slices=1):
  """The bytes of the mean.

  Args:
    layout: the layout of the gradients.
    gradients: the bytes of each.
    weights: of each; 1.0 by default.
    counts: how many gradients are summed in each; 1 by default.
    slices: into how many the work is cut.
  """
  reducer = Reducer(layout)
  ones = [1] * len(gradients)
  parts = [
    entries.Part(i, i, 0, 0, 0, count, float(weight))
    for i, (count, weight) in enumerate(
      zip(counts or ones, weights or ones, strict=True)
    )
  ]
  out = np.zeros(layout.nbytes, np.uint8)
  for start, stop in itertools.pairwise(layout.cuts(slices)):
    low, high = layout.bytes_of(start, stop)
    rows = [np.frombuffer(raw, np.uint8)[low:high] for raw in gradients]
    reducer.slice(reducer.sum_of(parts), rows, start, stop, out[low:high])
  return out.tobytes()
