"""How a replica learns that its run has ended, and gets the final state."""

from __future__ import annotations

import dataclasses
import math

from optax_dist.coordinator.protocol.entries import Ended


@dataclasses.dataclass(slots=True)
class Ending:
  """The end of the run, and the request for the final state.

  Attributes:
    ended: how it has ended; None if it hasn't.
    by: when the final state is not waited for any more; infinity if it was not
      requested, or is on its way.
    is_requested: whether it was requested from the coordinator that is connected.
  """

  ended: Ended | None = None
  by: float = math.inf
  is_requested: bool = False

  def disconnected(self) -> None:
    """The coordinator that was asked is not connected any more."""
    self.is_requested, self.by = False, math.inf

  def request(self, by: float) -> bool:
    """Whether to request the final state: once; it is to be there by then."""
    if self.is_requested:
      return False
    self.is_requested, self.by = True, by
    return True

  def may_come(self, now: float) -> bool:
    """Whether it may come, after it was requested."""
    return now < self.by < math.inf
