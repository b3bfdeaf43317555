"""How long a replica has waited for what it can't go on without."""

from __future__ import annotations

import math


class Waiting:
  """Since when a replica waits for a step."""

  def __init__(self, limit: float):
    """Starts without waiting.

    Args:
      limit: how long it waits at most, in seconds.
    """
    self._limit = limit
    # The step that it has: the next one starts a new wait.
    self._since, self._step = math.inf, -1

  @property
  def deadline(self) -> float:
    """When it has waited for too long."""
    return self._since + self._limit

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
