"""How long replicas stall after one of them, or who coordinates them, was killed."""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import processes

# How long a survivor looks, before and after the kill; a stall may begin until so much
# before the end. The first to end its look holds up the others.
BEFORE, AFTER, END = 0.5, 4.0, 1.5
WHOM = ("replica", "coordinator")


def watch(step: Callable[[], bool], look: float = AFTER) -> None:
  """Makes steps for some seconds, says when each was committed, and ends.

  Args:
    step: takes a step; whether it was committed.
    look: seconds after the kill in which a stall may end.
  """
  times = [time.monotonic()]
  processes.say(ready=True)
  while time.monotonic() < times[0] + BEFORE + look:
    if step():
      times.append(time.monotonic())
  # One that has made no step since has stood still at least until now.
  processes.say(times=[*times, time.monotonic()])
  # Its end must not disturb another that still looks.
  time.sleep(1.0)
  processes.leave()


def killing(victim: processes.Process) -> Callable[[], None]:
  """Returns what kills a process of a group."""
  return lambda: os.killpg(victim.popen.pid, signal.SIGKILL)


def of_a_kill(
  group: processes.Group,
  kill: Callable[[], None],
  victims: Sequence[processes.Process],
  survivors: Sequence[processes.Process],
  moment: float,
  look: float = AFTER,
) -> dict[str, Any]:
  """Kills a process, and asks others how long they have stalled.

  Args:
    group: what they belong to.
    kill: does it, and starts what must be started again.
    victims: of the processes that `watch`, those that are killed.
    survivors: the others that do.
    moment: seconds to add to the time of the kill; steps follow each other
      at once, so that it falls anywhere in one.
    look: see `watch`.

  Returns:
    The longest time that a survivor took between two commits of which the
    second was after the kill, and its usual time for a step before.

  Raises:
    processes.Failed: if a survivor fails, or is not done in time.
  """
  for process in (*victims, *survivors):
    group.wait_for(process)
  time.sleep(BEFORE / 2 + moment)
  killed = time.monotonic()
  kill()
  stalls, usual, after = [], [], []
  for survivor in survivors:
    times = group.wait_for(survivor)["times"]
    gaps = [
      (b - a, b)
      for a, b in itertools.pairwise(times)
      if a < killed + look - END
    ]
    later = [gap for gap, end in gaps if end > killed]
    stalls.append(max(later))
    usual.append(statistics.median(gap for gap, end in gaps if end <= killed))
    after.append(len(later))
  return {
    "stall_seconds": max(stalls),
    "seconds_per_step": statistics.median(usual),
    "steps_after": min(after),
  }
