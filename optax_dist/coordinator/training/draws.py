"""The samples that one replica computes on, out of those leased to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp

if TYPE_CHECKING:
  from optax_dist.coordinator.runtime.inbox import TrainingInbox


class Draws:
  """The samples drawn for the next gradient.

  Attributes:
    seen: the notifications of the event loop so far.
    each: samples of one draw; 0 if samples are not leased.
    window: the number of samples of a step, if step s has the samples from s * window
      on; 0 if a step may have any samples.
    drawn: the samples of the gradient that is being computed; None if none are drawn.
  """

  def __init__(self, seen: TrainingInbox, each: int, window: int):
    """Starts without samples."""
    self.seen, self.each, self.window = seen, each, window
    self.drawn: Spans | None = None
    # The samples of earlier local steps: a submitted gradient has those of all of them.
    self._kept: list[Spans] = []

  @property
  def computed(self) -> Spans:
    """The samples of the gradient that is added to the sum next."""
    return sp.join(*self._kept) if self._kept else ()

  def keep(self) -> None:
    """Adds the drawn samples to those of the next gradient."""
    if self.drawn is not None:
      self._kept.append(self.drawn)
      self.drawn = None

  def take(self) -> Spans:
    """The samples of a gradient that is added to the sum now."""
    computed, self._kept = self.computed, []
    return computed

  def forget(self) -> None:
    """Abandons the gradient that is being computed; its samples can be drawn again."""
    self.drawn, self._kept = None, []

  def draw(self, step: int, summed: Iterable[Spans]) -> Spans | None:
    """Draws samples, unless some are drawn already; None if none are left."""
    if self.drawn is None:
      self.drawn = sp.head(self.left(step, summed), self.each)[0] or None
    return self.drawn

  def left(self, step: int, summed: Iterable[Spans]) -> Spans:
    """The samples that are leased for a sum and not drawn yet.

    Args:
      step: the step that the replica is at.
      summed: the samples of the gradients in the sum.
    """
    drawn = [*self._kept, *summed]
    return sp.minus(
      self.leased(step), (span for part in drawn for span in part)
    )

  def leased(self, step: int) -> Spans:
    """The samples leased to the current membership, for the step that it is at."""
    incarnation, spans = self.seen.lease
    if incarnation != self.seen.joined.incarnation or self.is_over(step):
      return ()
    return spans

  def is_leased_anew(self, step: int) -> bool:
    """Whether a restarted coordinator has leased other samples between local steps."""
    return bool(sp.minus(self.computed, self.leased(step)))

  def is_over(self, step: int) -> bool:
    """Whether the lease is for another step than the one the replica is at."""
    spans = self.seen.lease[1] if self.window else ()
    return bool(spans) and spans[0][0] // self.window != step
