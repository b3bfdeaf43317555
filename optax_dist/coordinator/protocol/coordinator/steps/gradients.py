"""The gradients that the rules have accepted, until they are committed or dropped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol.entries import Incarnation, Part
from optax_dist.coordinator.protocol.messages import SubmitGradient


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
  """A member's gradient, when it came, and whether it counts as finite."""

  incarnation: Incarnation
  message: SubmitGradient
  at: float
  finite: bool


class Gradients:
  """Gradients on their way into a step, and how many were dropped.

  Attributes:
    accepted: those that are accepted and not committed, at most one for each
      member.
    dropped: how many were dropped, by reason.
  """

  def __init__(self, dropped: Iterable[tuple[str, int]]):
    """Starts with the counts in the log."""
    self.accepted: dict[Incarnation, Arrival] = {}
    self.dropped = dict(dropped)

  @property
  def first(self) -> float:
    """When the first accepted one came; infinity for none."""
    return min((a.at for a in self.accepted.values()), default=math.inf)

  def drop(
    self, drop: quorum.Drop, arriving: Arrival | None
  ) -> tuple[Arrival | None, str]:
    """A gradient is dropped.

    Args:
      drop: the decision.
      arriving: the gradient that the rules were asked about, if any.

    Returns:
      The dropped one, None if it came to an earlier coordinator; and the reason.
    """
    new = drop.reason is not quorum.Reason.SUPERSEDED
    if new and arriving and arriving.incarnation == drop.incarnation:
      arrival: Arrival | None = arriving
    else:
      arrival = self.accepted.pop(drop.incarnation, None)
    reason = drop.reason
    finite = arrival is not None and arrival.finite
    if reason is quorum.Reason.NON_FINITE and finite:
      reason = quorum.Reason.RETURNED
    count = self.dropped.get(reason.value, 0) + drop.count
    self.dropped[reason.value] = count
    return arrival, reason.value

  def commit(self, parts: Sequence[Part]) -> list[Arrival]:
    """The gradients of a step, which is committed."""
    return [self.accepted.pop(part.incarnation) for part in parts]
