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

  def poll(self, refills: bool) -> None:
    """Passes on what they print, gives up those that have ended, and starts others.

    Args:
      refills: whether another one is started if there are too few. One after another:
        while they import and compile, replicas train beside them.
    """
    for process in list(self.processes):
      ended = process.has_ended()
      process.read_prints()
      if any(e.get("event") == "standby" for e in process.read()):
        self._starting = None
      if ended:
        process.kill()
        self.processes.remove(process)
        # Another one would end in the same way.
        self._wanted -= 1
        how = child.ending(process.popen)
        self._say(f"a standby {how}, and is not replaced")
    # Not if it has ended, or has become a replica.
    is_starting = self._starting in self.processes
    if refills and not is_starting and len(self.processes) < self._wanted:
      self._starting = self._start()
      self.processes.append(self._starting)
