"""How long survivors stall after a replica was killed in mid-step."""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import processes

# How long a survivor looks, from when it is ready; and how long after the kill a
# stall may begin. The first to end its look holds up the others.
BEFORE, AFTER, WITHIN = 0.5, 4.0, 2.5


def watch(step: Callable[[], bool]) -> None:
  """Makes steps for some seconds, says when each was committed, and ends.

  Args:
    step: takes a step; whether it was committed.
  """
  times = [time.monotonic()]
  processes.say(ready=True)
  while time.monotonic() < times[0] + BEFORE + AFTER:
    if step():
      times.append(time.monotonic())
  # One that has made no step since has stood still at least until now.
  processes.say(times=[*times, time.monotonic()])
  # Its end must not disturb another that still looks.
  time.sleep(1.0)
  processes.leave()


def of_a_kill(
  group: processes.Group,
  victim: processes.Process,
  survivors: Sequence[processes.Process],
  moment: float,
) -> dict[str, Any]:
  """Kills one of the processes that `watch`, and asks the others.

  Args:
    group: what they belong to.
    victim: the process to kill.
    survivors: the others.
    moment: seconds to add to the time of the kill; steps follow each other
      at once, so that it falls anywhere in one.

  Returns:
    The longest time that a survivor took between two commits of which the
    second was after the kill, and its usual time for a step before.

  Raises:
    processes.Failed: if a survivor fails, or is not done in time.
  """
  for process in (victim, *survivors):
    group.wait_for(process)
  time.sleep(BEFORE / 2 + moment)
  killed = time.monotonic()
  os.killpg(victim.popen.pid, signal.SIGKILL)
  stalls, usual, after = [], [], []
  for survivor in survivors:
    times = group.wait_for(survivor)["times"]
    gaps = [
      (b - a, b) for a, b in itertools.pairwise(times) if a < killed + WITHIN
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
