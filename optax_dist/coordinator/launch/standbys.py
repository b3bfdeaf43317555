"""Processes that stand by: they have imported and compiled, and wait for a number."""

from __future__ import annotations

from collections.abc import Callable

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.launch.child import Child


class Standbys:
  """The processes that take the places of replicas.

  Attributes:
    processes: the current standbys.
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
    """Passes on the standbys' output, removes those that have ended, starts others.

    Args:
      refills: whether to start another standby if there are too few. Only one starts at
        a time, since its imports slow down replicas that train.
    """
    for process in list(self.processes):
      ended = process.has_ended()
      process.read_prints()
      if any(e.get("event") == "standby" for e in process.read()):
        self._starting = None
      if ended:
        process.kill()
        self.processes.remove(process)
        # A new standby would end in the same way, so this one is not replaced.
        self._wanted -= 1
        how = child.ending(process.popen)
        self._say(f"a standby {how}, and is not replaced")
    # False if the standby has ended, or has become a replica.
    is_starting = self._starting in self.processes
    if refills and not is_starting and len(self.processes) < self._wanted:
      self._starting = self._start()
      self.processes.append(self._starting)
