"""Faults that a process injects into itself, for tests and demonstrations.

A launched process has them if its environment asks for them: `coordinator.join`
installs them. `optax_dist.coordinator.phases` reports the phase of a step.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from optax_dist.coordinator import phases
from optax_dist.coordinator.launch import channel, environment

# Phases that every replica passes in each step, whatever the sizes.
_PHASES = ("computing", "arrived", "applied")
# For how many seconds a replica is stopped.
_STOP_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Faults:
  """Which faults happen: at random, or at a given gradient.

  Attributes:
    kill: probability that a replica is killed, per gradient.
    kill_at: by replica, the gradient of its first process at which it is
      killed, counted from 1.
    stop: probability that it is stopped for a while, per gradient.
    slow: by replica, the factor by which its computation is slower.
  """

  kill: float = 0.0
  kill_at: Mapping[int, int] = dataclasses.field(default_factory=dict)
  stop: float = 0.0
  slow: Mapping[int, float] = dataclasses.field(default_factory=dict)

  @classmethod
  def parse(cls, text: str) -> Faults:
    """Parses the value of `optax-dist launch --chaos`.

    Raises:
      ValueError: the text is invalid; the message says what is expected.

    Example:
      >>> Faults.parse("kill:0.02,slow:2x5").slow
      {2: 5.0}
      >>> Faults.parse("kill:1@40").kill_at  # Replica 1, at its 40th gradient.
      {1: 40}
    """
    kill = stop = 0.0
    kill_at: dict[int, int] = {}
    slow: dict[int, float] = {}
    for part in text.split(","):
      try:
        match re.split("(:|@|x)", part):
          case ["kill", ":", probability] if 0 <= float(probability) < 1:
            kill = float(probability)
          case ["stop", ":", probability] if 0 <= float(probability) < 1:
            stop = float(probability)
          case ["kill", ":", who, "@", nth] if int(nth) >= 1:
            kill_at[_index(who)] = int(nth)
          case ["slow", ":", who, "x", factor] if float(factor) >= 1:
            slow[_index(who)] = float(factor)
          case _:
            raise ValueError(part)
      except ValueError:
        raise ValueError(
          "faults must be kill:P, stop:P (probabilities below 1),"
          " kill:REPLICA@GRADIENT or slow:REPLICAxFACTOR, with commas between,"
          f" got {part!r}."
        ) from None
    return cls(kill, kill_at, stop, slow)

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


def _index(text: str) -> int:
  if not text.isdecimal():
    raise ValueError(text)
  return int(text)


class _Random:
  """Draws whether a fault happens in this step, and in which phase."""

  def __init__(self, faults: Faults, place: tuple[int, int], channel: Any):
    self._faults, self._place, self._channel = faults, place, channel
    self._steps = 0
    self._armed: tuple[str, str] | None = None

  def __call__(self, phase: str, replica: object) -> None:
    if phase == "computing":
      self._draw()
    if self._armed is not None and self._armed[1] == phase:
      fault, self._armed = self._armed[0], None
      self._strike(fault, phase)

  def _draw(self) -> None:
    self._steps += 1
    rng = np.random.default_rng([0, *self._place, self._steps])
    kill, stop = rng.random(2)
    phase = str(rng.choice(_PHASES))
    replica, restarts = self._place
    planned = self._faults.kill_at.get(replica) if restarts == 0 else None
    if self._steps == planned:
      self._armed = ("kill", "arrived")
    elif kill < self._faults.kill:
      self._armed = ("kill", phase)
    elif stop < self._faults.stop:
      self._armed = ("stop", phase)

  def _strike(self, fault: str, phase: str) -> None:
    self._channel.say("fault", fault=fault, phase=phase)
    if fault == "kill":
      os.kill(os.getpid(), signal.SIGKILL)
    # Another process has to continue it.
    wake = f"sleep {_STOP_SECONDS:g}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    # Sent to this thread so that it stops here; another thread might get the
    # signal late.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def install(told: environment.Environment, line: channel.Channel) -> None:
  """Installs the faults that the environment asks for, if any.

  Args:
    told: the environment of this replica.
    line: channel to the launcher, which is told of each fault.
  """
  if told.faults is None or told.replica is None:
    return
  faults = Faults.parse(told.faults)
  place = (told.replica, told.restarts or 0)
  if faults.kill or faults.kill_at or faults.stop:
    phases.listen(_Random(faults, place, line))
  phases.slow_down(factor=faults.slow.get(told.replica, 1.0))
