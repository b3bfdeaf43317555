"""Processes that are stopped, and when they go on."""

from __future__ import annotations

import signal
import time

from optax_dist.coordinator.launch import child


class Stopped:
  """Continues stopped processes, each after its time; false without any."""

  def __init__(self) -> None:
    self._until: list[tuple[float, child.Child]] = []

  def __bool__(self) -> bool:
    return bool(self._until)

  def add(self, process: child.Child, seconds: float) -> None:
    """A process is stopped, and goes on after so many seconds."""
    self._until.append((time.monotonic() + seconds, process))

  def continue_due(self) -> None:
    """Continues those whose time is over."""
    now = time.monotonic()
    for until, process in list(self._until):
      if now >= until:
        self._until.remove((until, process))
        process.signal(signal.SIGCONT)

  def continue_all(self) -> None:
    """Continues all, at the end of a run."""
    for _, process in self._until:
      process.signal(signal.SIGCONT)
