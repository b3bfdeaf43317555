"""Faults that a process inflicts on itself, for tests and demonstrations.

A launched process has them if its environment says so: `coordinator.join`
installs them. `optax_dist.coordinator.phases` tells where it is in a step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from optax_dist.coordinator import phases
from optax_dist.coordinator.launch import channel, environment

# Phases of a step that every replica passes, whatever the sizes.
_PHASES = ("computing", "arrived", "applied")


@dataclasses.dataclass(frozen=True)
class Faults:
  """What happens: at random, or at a given gradient.

  Attributes:
    kill: probability that a replica is killed, for each gradient.
    kill_at: by replica, which of its first process's gradients it is killed at,
      counted from 1.
    stop: probability that it is stopped for a while.
    slow: by replica, how many times longer it computes.
    seconds: for how long it is stopped.
    seed: of the draws.
  """

  kill: float = 0.0
  kill_at: Mapping[int, int] = dataclasses.field(default_factory=dict)
  stop: float = 0.0
  slow: Mapping[int, float] = dataclasses.field(default_factory=dict)
  seconds: float = 2.0
  seed: int = 0

  def dump(self) -> str:
    """As text, for the environment."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def load(cls, text: str) -> Faults:
    """From text."""
    fields = json.loads(text)
    for name in ("kill_at", "slow"):
      fields[name] = {int(k): v for k, v in fields[name].items()}
    return cls(**fields)


class _Random:
  """Draws whether something happens in this step, and in which phase."""

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
    rng = np.random.default_rng([self._faults.seed, *self._place, self._steps])
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
    self._channel.say("stop", seconds=self._faults.seconds)
    # To this thread: it goes no further, while others might take a signal late.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def install(told: environment.Environment, line: channel.Channel) -> None:
  """Installs what the environment says, if it says anything.

  Args:
    told: the environment of this replica.
    line: to the launcher, which has the process continued.
  """
  if told.faults is None or told.replica is None:
    return
  faults = Faults.load(told.faults)
  place = (told.replica, told.restarts or 0)
  if faults.kill or faults.kill_at or faults.stop:
    phases.listen(_Random(faults, place, line))
  phases.slow_down(factor=faults.slow.get(told.replica, 1.0))
