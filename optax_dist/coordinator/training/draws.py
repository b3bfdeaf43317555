"""The samples of one replica: which of those that are leased it computes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Leases(Protocol):
  """What the event loop has notified of them.

  Attributes:
    lease: the membership that samples are leased to, and the samples.
    incarnation: of the membership; -1 before the first.
  """

  lease: tuple[Incarnation, Spans]
  incarnation: Incarnation


class Draws:
  """The samples drawn for the next gradient.

  Attributes:
    each: samples of one draw; 0: samples are not leased.
    window: samples of a step, if step s has those from s * window on; 0: they may
      be any.
    drawn: the samples of the gradient that is computed; None: none are drawn.
  """

  def __init__(self, each: int, window: int):
    """Starts without any."""
    self.each, self.window = each, window
    self.drawn: Spans | None = None
    # With local steps a gradient has the samples of all of them.
    self._kept: list[Spans] = []

  @property
  def computed(self) -> Spans:
    """The samples of the gradient that is added next."""
    return sp.join(*self._kept) if self._kept else ()

  def keep(self) -> None:
    """Adds the drawn samples to those of the next gradient."""
    if self.drawn is not None:
      self._kept.append(self.drawn)
      self.drawn = None

  def take(self) -> Spans:
    """The samples of a gradient, which is added now."""
    computed, self._kept = self.computed, []
    return computed

  def forget(self) -> None:
    """What is computed is given up."""
    self.drawn, self._kept = None, []

  def draw(
    self, seen: Leases, step: int, summed: Iterable[Spans]
  ) -> Spans | None:
    """Draws samples, unless some are drawn already; None if none are left."""
    if self.drawn is None:
      self.drawn = sp.head(self.left(seen, step, summed), self.each)[0] or None
    return self.drawn

  def left(self, seen: Leases, step: int, summed: Iterable[Spans]) -> Spans:
    """What is leased for a sum and not drawn yet.

    Args:
      seen: what was notified.
      step: the step that the replica is at.
      summed: the samples of the gradients in the sum.
    """
    drawn = [*self._kept, *summed]
    return sp.minus(
      self.leased(seen, step), (span for part in drawn for span in part)
    )

  def leased(self, seen: Leases, step: int) -> Spans:
    """What is leased to the current membership, for the step it is at."""
    incarnation, spans = seen.lease
    if incarnation != seen.incarnation or self.is_over(seen, step):
      return ()
    return spans

  def is_leased_anew(self, seen: Leases, step: int) -> bool:
    """Whether a restarted coordinator has leased other samples amid local steps."""
    return bool(sp.minus(self.computed, self.leased(seen, step)))

  def is_over(self, seen: Leases, step: int) -> bool:
    """Whether the lease is of another step than the one it is at."""
    spans = seen.lease[1] if self.window else ()
    return bool(spans) and spans[0][0] // self.window != step
