"""What a replica computes next: how many gradients, on which samples."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Committed, Incarnation
from optax_dist.ledger import Spans


class Assignment:
  """What the coordinator has asked of this replica.

  Attributes:
    requested: how many gradients.
    lease: the samples that it computes on.
  """

  def __init__(self, has_data: bool, out: list[Effect]):
    """Starts with one gradient and no samples.

    Args:
      has_data: whether samples are leased.
      out: the list to which effects are appended.
    """
    self._has_data = has_data
    self._out = out
    self.requested = 1
    self.lease: Spans = ()

  def request(self, count: int) -> None:
    """It should compute so many gradients."""
    if count != self.requested:
      self.requested = count
      self._out.append(fx.SetRequested(count))

  def lease_to(self, incarnation: Incarnation, spans: Spans) -> None:
    """Sets the samples of a membership."""
    if not self._has_data or incarnation < 0:
      return
    self.lease = spans
    self._out.append(fx.Leased(incarnation, spans))

  def committed(self, commit: Committed, incarnation: Incarnation) -> None:
    """Takes the lease of a membership from a commit."""
    for lease in commit.leases:
      if lease.incarnation == incarnation:
        self.lease_to(incarnation, lease.spans)

  def end(self) -> None:
    """The membership has ended, and its leases with it."""
    self.lease = ()
