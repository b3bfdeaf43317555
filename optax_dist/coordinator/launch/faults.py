"""Faults that a process injects into itself, for tests and demonstrations.

A launched process has them if its environment asks for them: `coordinator.join`
installs them. `coordinator._internal.phases` reports the phase of a step.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Mapping

from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.launch import environment

# Gradients are counted from 1, and factors are at least 1.
_FAULT = re.compile(
  r"kill:(\d+)@([1-9]\d*)|slow:(\d+)x([1-9]\d*(?:\.\d+)?)", re.ASCII
)


@dataclasses.dataclass(frozen=True)
class Faults:
  """Which faults happen.

  Attributes:
    kill_at: by replica, the gradient of its first process at which it is
      killed, counted from 1.
    slow: by replica, the factor by which its computation is slower.
  """

  kill_at: Mapping[int, int] = dataclasses.field(default_factory=dict)
  slow: Mapping[int, float] = dataclasses.field(default_factory=dict)

  @classmethod
  def parse(cls, text: str) -> Faults:
    """Parses the value of `optax-dist launch --chaos`.

    Raises:
      ValueError: the text is invalid; the message says what is expected.

    Example:
      >>> Faults.parse("kill:1@40,slow:2x5")  # Replica 1, at its 40th gradient.
      Faults(kill_at={1: 40}, slow={2: 5.0})
    """
    kill_at: dict[int, int] = {}
    slow: dict[int, float] = {}
    for part in text.split(","):
      match = _FAULT.fullmatch(part)
      if match is None:
        raise ValueError(
          "faults must be kill:REPLICA@GRADIENT or slow:REPLICAxFACTOR, with"
          f" commas between, got {part!r}."
        )
      killed, nth, slowed, factor = match.groups()
      if killed:
        kill_at[int(killed)] = int(nth)
      else:
        slow[int(slowed)] = float(factor)
    return cls(kill_at, slow)

  def check(self, replicas: int) -> None:
    """Checks that the replicas named exist.

    Raises:
      ValueError: one does not.
    """
    for replica in (*self.kill_at, *self.slow):
      if replica >= replicas:
        raise ValueError(
          f"faults name replica {replica}, but there are {replicas} replicas,"
          f" numbered 0 to {replicas - 1}."
        )


def install(
  launched: environment.Environment, process: environment.ProcessEnvironment
) -> None:
  """Installs the faults that the environment asks for, if any.

  Args:
    launched: the environment of the job.
    process: which process this is.
  """
  if launched.faults is None or process.replica is None:
    return
  faults = Faults.parse(launched.faults)
  phases.slow_down(factor=faults.slow.get(process.replica, 1.0))
  kill_at = faults.kill_at.get(process.replica)
  if kill_at is None or process.restarts:
    return
  gradients = 0

  def kill(phase: str, replica: object) -> None:
    nonlocal gradients
    gradients += phase == "computing"
    if phase == "arrived" and gradients >= kill_at:
      os.kill(os.getpid(), signal.SIGKILL)

  phases.listen(kill)
