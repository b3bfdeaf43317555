"""How long a replica waits, and what it knows of why."""

from __future__ import annotations

import math


class Patience:
  """Since when a replica waits for a step, and what it has heard meanwhile.

  Attributes:
    missing: whom the run waits for, as the coordinator says; "" for nobody.
    trouble: why the coordinator is not connected; "" if nothing is known.
  """

  def __init__(self, limit: float):
    """Starts without waiting.

    Args:
      limit: how long it waits at most, in seconds.
    """
    self._limit = limit
    # The step that it has: the next one starts a new wait.
    self._since, self._step = math.inf, -1
    self.missing = self.trouble = ""
    # When the coordinator was last heard from, by which message.
    self._heard: tuple[float, str] | None = None

  @property
  def deadline(self) -> float:
    """When it has waited for too long."""
    return self._since + self._limit

  def heard(self, message: object, now: float) -> None:
    """A message of the coordinator has come."""
    self._heard = now, type(message).__name__

  def begin_anew(self) -> None:
    """What it waits for has come, or is something else now."""
    self._since = math.inf

  def check(self, waits: bool, step: int, now: float) -> str:
    """For how long it has waited, if that is too long; otherwise "".

    Args:
      waits: whether it waits for anything.
      step: the step of its state.
      now: the time.
    """
    if not waits:
      self._since = math.inf
    elif math.isinf(self._since) or self._step != step:
      self._since, self._step = now, step
    elif now >= self.deadline:
      return f"has waited {now - self._since:.1f} s"
    return ""

  def why(self, what: str, away: str, now: float) -> str:
    """What it waits for, and why that does not come, human-readable.

    Args:
      what: it waits for.
      away: the address of a coordinator that is not connected; "" if it is.
      now: the time.
    """
    whose, who = "the coordinator", ""
    if away:
      whose, who = "it", f"the coordinator at {away} is not connected"
      if self.trouble:
        who += f" ({self.trouble})"
    heard = f"{whose} has not sent a message yet"
    if self._heard is not None:
      at, message = self._heard
      whose = "its" if away else f"{whose}'s"
      heard = f"{whose} last message came {now - at:.1f} s ago ({message})"
    return "; ".join(filter(None, (what, who, heard, self.missing)))
