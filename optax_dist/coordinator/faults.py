"""Faults that a process injects into itself, for tests and demonstrations.

A launched process has them if its environment asks for them: `coordinator.join`
installs them. `optax_dist.coordinator.phases` reports the phase of a step.
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

# Phases that every replica passes in each step, whatever the sizes.
_PHASES = ("computing", "arrived", "applied")


@dataclasses.dataclass(frozen=True)
class Faults:
  """Which faults happen: at random, or at a given gradient.

  Attributes:
    kill: probability that a replica is killed, per gradient.
    kill_at: by replica, the gradient of its first process at which it is
      killed, counted from 1.
    stop: probability that it is stopped for a while, per gradient.
    slow: by replica, the factor by which its computation is slower.
    seconds: how long it is stopped.
    seed: seed of the random draws.
  """

  kill: float = 0.0
  kill_at: Mapping[int, int] = dataclasses.field(default_factory=dict)
  stop: float = 0.0
  slow: Mapping[int, float] = dataclasses.field(default_factory=dict)
  seconds: float = 2.0
  seed: int = 0

  def dump(self) -> str:
    """Serializes the faults as text, for the environment."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def load(cls, text: str) -> Faults:
    """Parses the text of `dump`."""
    fields = json.loads(text)
    for name in ("kill_at", "slow"):
      fields[name] = {int(k): v for k, v in fields[name].items()}
    return cls(**fields)


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
    # Sent to this thread so that it stops here; another thread might get the
    # signal late.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def install(told: environment.Environment, line: channel.Channel) -> None:
  """Installs the faults that the environment asks for, if any.

  Args:
    told: the environment of this replica.
    line: channel to the launcher, which continues the process.
  """
  if told.faults is None or told.replica is None:
    return
  faults = Faults.load(told.faults)
  place = (told.replica, told.restarts or 0)
  if faults.kill or faults.kill_at or faults.stop:
    phases.listen(_Random(faults, place, line))
  phases.slow_down(factor=faults.slow.get(told.replica, 1.0))
