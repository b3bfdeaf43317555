"""What a replica computes next: how many gradients, on which samples."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Committed, Incarnation
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Assignment:
  """What the coordinator has asked of this replica.

  Attributes:
    requested: how many gradients.
    lease: the samples that it computes on, or has submitted without an answer.
  """

  def __init__(self, unit: int, out: list[Effect]):
    """Starts with one gradient and no samples.

    Args:
      unit: samples of a gradient, if samples are leased; otherwise 0.
      out: the list to which effects are appended.
    """
    self._unit = unit
    self._out = out
    self.requested = 1
    self.lease: Spans = ()

  def request(self, count: int) -> None:
    """It should compute so many gradients."""
    if count != self.requested:
      self.requested = count
      self._out.append(fx.SetRequested(count))

  def lease_to(
    self, incarnation: Incarnation, spans: Spans, more: bool = False
  ) -> None:
    """Sets the samples of a membership; with `more`, adds to buffered ones."""
    if not self._unit or incarnation < 0:
      return
    self.lease = sp.union(self.lease, spans) if more else spans
    self._out.append(fx.Leased(incarnation, spans))

  def committed(self, commit: Committed, incarnation: Incarnation) -> None:
    """Takes the lease of a membership from a commit."""
    for lease in commit.leases:
      if lease.incarnation == incarnation:
        self.lease_to(incarnation, lease.spans)

  def last(self, spans: Spans, count: int, total: int) -> Spans:
    """Of the samples of a sum of `total` gradients, those of the last ones."""
    if not self._unit or count == total:
      return spans
    return sp.tail(spans, count * self._unit)

  def end(self) -> None:
    """The membership has ended, and its leases with it."""
    self.lease = ()
