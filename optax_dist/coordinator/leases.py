"""The indices of leased samples, for a training loop."""

from __future__ import annotations

import numpy as np

from optax_dist import ledger
from optax_dist.ledger import Spans

# Indices are computed in blocks of this size, since that is cheaper,
_BLOCK = 8192
_BLOCKS = 4
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
    self._blocks: dict[int, np.ndarray] = {}

  def __call__(self, spans: Spans) -> np.ndarray:
    """The samples' indices, as a read-only array."""
    if self._apart:
      return self.data.indices(spans)
    if len(spans) == 1:
      # Most often it is one range, within a block.
      ((start, stop),) = spans
      number = start // _BLOCK
      first = number * _BLOCK
      if stop <= first + _BLOCK:
        return self._block(number)[start - first : stop - first]
    parts: list[np.ndarray] = []
    for start, stop in spans:
      while start < stop:
        number = start // _BLOCK
        end = min(stop, (number + 1) * _BLOCK)
        first = number * _BLOCK
        parts.append(self._block(number)[start - first : end - first])
        start = end
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

  def _block(self, number: int) -> np.ndarray:
    found = self._blocks.get(number)
    if found is None:
      first, last = number * _BLOCK, (number + 1) * _BLOCK
      if self.data.total is not None:
        last = min(last, self.data.total)
      found = self.data.indices(((first, last),))
      found.flags.writeable = False
      while len(self._blocks) >= _BLOCKS:
        del self._blocks[next(iter(self._blocks))]
      self._blocks[number] = found
    return found
