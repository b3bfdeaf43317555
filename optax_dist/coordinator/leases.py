"""The training loop's side of the ledger: draws samples from leased spans."""

from __future__ import annotations

import numpy as np

from optax_dist import ledger
from optax_dist.coordinator.runtime.handover import Handover
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp

# Indices are computed in blocks of this size, since that is cheaper,
_BLOCK = 8192
_BLOCKS = 4
# unless other replicas draw this many per step: a call costs as much as these.
_OTHERS = 2048


class Leases:
  """The spans leased to a replica, and what it has drawn from them.

  Attributes:
    data: the data set and how it is split into batches.
    out: drawn, with no gradient yet; None if there are none.
    left: leased for the gradient or sum being computed, and not drawn yet.
    drawn: the samples of each gradient in the sum; with local steps, those of a
      complete round.
    round: the samples of the local steps of this round so far.
  """

  def __init__(
    self, data: ledger.Batches, unit: int, period: int, handover: Handover
  ):
    """Creates the leases of a replica.

    Args:
      data: the data set and how it is split into batches.
      unit: samples in what is submitted as one gradient.
      period: local steps per submission.
      handover: where leases arrive.

    Raises:
      ValueError: the local steps don't divide the samples evenly.
    """
    if unit % period:
      steps = data.global_batch // unit * period
      raise ValueError(
        f"global_batch must be a multiple of the {steps} local steps of a round"
        f" (communication_period is {period}), got {data.global_batch}."
      )
    self.data = data
    self.out: Spans | None = None
    self.left: Spans = ()
    self.drawn: list[Spans] = []
    self.round: list[Spans] = []
    self._period, self._batch = period, unit // period
    self._handover = handover
    self._apart = data.global_batch - self._batch > _OTHERS
    self._blocks: dict[int, np.ndarray] = {}

  @property
  def ready(self) -> bool:
    """Whether there is a lease to draw from."""
    return bool(self._lease())

  def _lease(self) -> Spans:
    """What is leased to the membership of now; empty: nothing is."""
    incarnation, spans = self._handover.lease
    return spans if incarnation == self._handover.incarnation else ()

  def draw(self, anew: bool) -> Spans | None:
    """The samples of the next gradient; None if there are none for now.

    Args:
      anew: whether this is the first part of a gradient or sum, or the rest of
        one.
    """
    if self.out is None:
      if anew and not self.round:
        self.left = self._lease()
      left = self.left
      if not left:
        return None
      if sp.size(left) == self._batch:
        self.out, self.left = left, ()
      else:
        self.out, self.left = sp.head(left, self._batch)
    return self.out

  def submit(self) -> None:
    """Adds the gradient on the drawn samples to the sum, or to the round."""
    assert self.out is not None
    out, self.out = self.out, None
    if self._period == 1:
      self.drawn.append(out)
      return
    self.round.append(out)
    if len(self.round) == self._period:
      self.drawn.append(sp.join(*self.round))
      self.round = []

  def latest(self, count: int) -> Spans:
    """The samples of the last gradients of the sum."""
    if count == 1:
      return self.drawn[-1]
    return sp.join(*self.drawn[-count:]) if count else ()

  def clear(self) -> None:
    """Starts another sum or round."""
    self.out, self.left, self.drawn, self.round = None, (), [], []

  def indices(self, spans: Spans) -> np.ndarray:
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
