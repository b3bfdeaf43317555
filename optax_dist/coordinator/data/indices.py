"""The indices of leased samples, for a training loop."""

from __future__ import annotations

import numpy as np

from optax_dist import ledger
from optax_dist.ledger import Spans

# Indices are computed in blocks of this size, since that is cheaper,
_BLOCK = 8192
# unless other replicas draw this many per step: a call costs as much as these.
_OTHERS = 2048


class Indices:
  """The indices of the samples in spans.

  Attributes:
    data: the data set and how it is split into batches.
    samples: how many a gradient, or local step, is computed on.
  """

  def __init__(self, data: ledger.Batches, unit: int, period: int):
    """Creates the indices.

    Args:
      data: the data set and how it is split into batches.
      unit: samples in what is submitted as one gradient.
      period: local steps per submission.

    Raises:
      ValueError: the local steps don't divide the samples evenly.
    """
    if unit % period:
      steps = data.global_batch // unit * period
      raise ValueError(
        f"global_batch must be a multiple of the {steps} local steps of a round"
        f" (communication_period is {period}), got {data.global_batch}."
      )
    self.data, self.samples = data, unit // period
    self._apart = data.global_batch - self.samples > _OTHERS
    # The indices of the samples from `_first` on.
    self._first, self._block = 0, np.zeros(0, np.int64)

  def __call__(self, spans: Spans) -> np.ndarray:
    """The samples' indices, as a read-only array."""
    if self._apart or len(spans) != 1:
      return self.data.indices(spans)
    ((start, stop),) = spans
    if not self._first <= start <= stop <= self._first + len(self._block):
      last = max(stop, start + _BLOCK)
      if self.data.total is not None:
        last = min(last, self.data.total)
      self._first, self._block = start, self.data.indices(((start, last),))
      self._block.flags.writeable = False
    return self._block[start - self._first : stop - self._first]
