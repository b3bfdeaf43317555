"""Processes that stand by: they have imported and compiled, and wait for a number.

    launcher   starts it without a number -- a replica dies --> tells it that number
    process    imports, calls join -> "standby" ... waits ... -> joins as that replica

Until then it is in no run, and nobody knows of it but its launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.launch.channel import Channel
from optax_dist.coordinator.launch.child import Child
from optax_dist.coordinator.launch.environment import (
  ProcessEnvironment,
  variable,
)


class Standbys:
  """The processes of this host that stand by, for their launcher.

  Attributes:
    processes: these.
  """

  def __init__(
    self, wanted: int, start: Callable[[], Child], say: Callable[[str], None]
  ):
    """Starts none yet.

    Args:
      wanted: how many there should be.
      start: starts one.
      say: called with what people must know.
    """
    self.processes: list[Child] = []
    self._wanted, self._start, self._say = wanted, start, say

  def fill(self) -> None:
    """Starts those that are missing."""
    while len(self.processes) < self._wanted:
      self.processes.append(self._start())

  def poll(self) -> None:
    """Passes on what they print, and gives up those that have ended."""
    for process in list(self.processes):
      ended = process.has_ended()
      process.read_prints()
      process.read()
      if ended:
        process.kill()
        self.processes.remove(process)
        # Another one would end in the same way.
        self._wanted -= 1
        how = child.ending(process.popen)
        self._say(f"a standby {how}, and is not replaced")

  def take(self, which: ProcessEnvironment) -> Child | None:
    """Has one become a replica; None if there is none.

    Args:
      which: replica.
    """
    if not self.processes:
      return None
    process = self.processes.pop(0)
    process.tell("replica", variables=which.variables())
    return process


def wait(channel: Channel) -> ProcessEnvironment:
  """Waits until this process becomes a replica; its launcher ends it otherwise.

  Returns:
    Which one; so its environment says from now on.
  """
  channel.say("standby")
  for event in channel.events():
    os.environ.update(event["variables"])
    del os.environ[variable("standby")]
    return ProcessEnvironment.read()
  raise SystemExit("The launcher of this standby has ended.")
