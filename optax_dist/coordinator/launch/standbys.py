"""Processes that stand by: they have imported and compiled, and wait for a number."""

from __future__ import annotations

from collections.abc import Callable

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.launch.child import Child


class Standbys:
  """The processes that take the places of replicas.

  Attributes:
    processes: those that there are.
  """

  def __init__(
    self,
    wanted: int,
    start: Callable[[], Child],
    say: Callable[[str], None],
  ):
    """Begins without any.

    Args:
      wanted: how many there should be.
      start: starts one.
      say: called with what people must know.
    """
    self.processes: list[Child] = []
    self._wanted, self._start, self._say = wanted, start, say
    # The one that does not wait yet.
    self._starting: Child | None = None

  def take(self) -> Child:
    """Takes one away, to become a replica."""
    taken = self.processes.pop(0)
    if taken is self._starting:
      self._starting = None
    return taken

  def poll(self) -> None:
    """Passes on what they print, and gives up those that have ended."""
    for process in list(self.processes):
      ended = process.has_ended()
      process.read_prints()
      is_ready = any(e.get("event") == "standby" for e in process.read())
      if process is self._starting and (ended or is_ready):
        self._starting = None
      if ended:
        process.kill()
        self.processes.remove(process)
        # Another one would end in the same way.
        self._wanted -= 1
        how = child.ending(process.popen)
        self._say(f"a standby {how}, and is not replaced")

  def refill(self) -> None:
    """Starts another one if there are too few, and all others wait.

    One after another: while they import and compile, replicas train beside them.
    """
    if self._starting is None and len(self.processes) < self._wanted:
      self._starting = self._start()
      self.processes.append(self._starting)
