"""How a run ends: once all members have the final state, or after a while."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Shutdown:
  """How far a run is on its way to its end.

  Attributes:
    since: since when members are waited for that lack the final state; None if
      the run goes on.
    is_decided: whether the end is in the log, so that nothing else is decided.
    reason: why, human-readable.
  """

  since: float | None = None
  is_decided: bool = False
  reason: str = "all replicas have left"

  @property
  def has_begun(self) -> bool:
    """Whether no more steps are committed."""
    return self.since is not None or self.is_decided

  def begin(self, now: float) -> None:
    """Commits nothing more."""
    if self.since is None:
      self.since = now

  def decide(self, now: float) -> None:
    """The end is decided, for whatever reason."""
    self.is_decided = True
    self.begin(now)
