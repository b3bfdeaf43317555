"""How a run ends: once all members have the final state, or after a while."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(slots=True)
class Ending:
  """How far the end of a run is.

  Attributes:
    since: since when members are waited for that lack the final state: None if
      the run goes on, infinity while its last step is not in the log.
    is_decided: whether the end is decided, so that nothing else is.
    reason: why, for people.
  """

  since: float | None = None
  is_decided: bool = False
  reason: str = "all replicas have left"

  @property
  def has_begun(self) -> bool:
    """Whether no more steps are committed."""
    return self.since is not None

  def begin(self, now: float, logged: bool) -> None:
    """Commits nothing more.

    Args:
      now: the time.
      logged: whether the last step is in the log.
    """
    if self.since is None:
      self.since = now if logged else math.inf

  def step_logged(self, now: float) -> None:
    """A step is in the log: members may learn of it from now on."""
    if self.since is not None:
      self.since = now

  def decide(self, now: float) -> None:
    """The end is decided, for whatever reason."""
    self.is_decided = True
    self.begin(now, logged=True)
