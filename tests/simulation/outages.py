"""Faults that last longer than any deadline, or that deadlines don't help with.

They are in schedules of their own, so that all others stay what they were. A
setting is changed where a fault would stop the run otherwise: where one replica
is away for longer than the run's timeout, the others must not need it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.simulation.world import (
  ATTEMPT_TIMEOUT,
  LEADER_TIMEOUT,
  SILENCE,
  TIMEOUT,
  Setting,
)

# Of a seed divided by 16: those whose schedules are from here.
RESIDUES = (3, 4, 11)

# Longer than a replica waits for anything.
BEYOND = TIMEOUT + 3 * LEADER_TIMEOUT + ATTEMPT_TIMEOUT + 15.0

_KINDS = (
  ("all stop", 4),
  ("stop beyond", 3),
  ("cut again", 6),
  ("stop, and die", 2),
  ("store is silent", 2),
  ("store is lost", 1),
  ("bytes", 2),
  ("twin", 2),
  ("stranger", 1),
  ("damage", 2),
  ("save", 2),
  ("crawl", 2),
  ("storm", 4),
)
# What strikes again and again within a moment, and how long it lasts.
_STORM = ("cut", "cut", "cut", "lag", "pause", "break", "kill leader")
_BYTES = ("truncated", "longer", "another version", "random", "empty")

Faults = tuple[tuple[float, str, tuple[Any, ...]], ...]


def schedule(
  seed: int, setting: Setting, pace: float
) -> tuple[Setting, Faults]:
  """The setting and the faults of a seed.

  Args:
    seed: it.
    setting: the setting of another schedule.
    pace: seconds that its steps take, about.
  """
  r = random.Random(f"outages of {seed}")
  setting = dataclasses.replace(
    setting,
    adaptive=r.random() < 0.7,
    coded=r.random() < 0.5,
    leaves=False,
    steps=2 * setting.steps,
  )
  if not setting.alone:
    setting = dataclasses.replace(
      setting, needed=r.choice((setting.needed, setting.replicas - 1))
    )
  (kind,) = r.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])
  index = r.randrange(setting.replicas)
  # Mostly amid a step, and sometimes in a run that has just begun.
  time = r.choice((0.0, 0.2, 1.0)) + r.expovariate(1.0 / (3 * pace))
  match kind:
    case "all stop":
      long = r.choice((2.0, SILENCE + 2.0, 20.0, 60.0, BEYOND))
      times = [time + i * (long + r.choice((1.0, 5.0))) for i in range(2)]
      return setting, tuple((at, kind, (index, long)) for at in times)
    case "stop beyond":
      # The others go on, or fail for good reason.
      needed = min(setting.needed, setting.replicas - 1)
      setting = dataclasses.replace(setting, needed=needed)
      return setting, ((time, "stop", (index, BEYOND)),)
    case "cut again":
      setting = _slow(setting, 1.0, 24)
      setting = dataclasses.replace(setting, adaptive=True)
      return setting, tuple(_cuts(setting, index, time, r))
    case "stop, and die":
      moment = r.choice((0.0, 0.001, 0.05))
      long = r.choice((1.0, SILENCE + 1.0, 3 * LEADER_TIMEOUT))
      return setting, ((time, kind, (index, long, moment)),)
    case "store is silent":
      long = r.choice((3 * LEADER_TIMEOUT, 60.0, BEYOND))
      return setting, ((time, kind, (index, long)),)
    case "bytes":
      struck = [
        (time + 0.1 * i, kind, (r.randrange(setting.replicas), how))
        for i, how in enumerate(_BYTES)
      ]
      return setting, tuple(struck)
    case "crawl":
      # For longer than the leader waits until it asks, and sent all the time.
      setting = dataclasses.replace(
        setting, inline=False, alone=False, needed=max(2, setting.needed)
      )
      return setting, ((time, kind, (index, 3 * ATTEMPT_TIMEOUT)),)
    case "storm":
      return setting, tuple(_storm(setting, time, r))
    case "twin":
      # Until the two could have replaced each other some times.
      setting = _slow(setting, 1.0, 30)
      return setting, ((time, kind, (index,)),)
    case "stranger":
      return setting, ((time + 0.2, kind, (index,)),)
    case "save":
      # The leader that it was told to dies, mostly before it could save.
      after = time + r.choice((0.0, 0.001, 0.02))
      dies = (after, "kill leader", (index, 0.5))
      return setting, ((time, kind, (index,)), dies)
    case "damage":
      every = r.choice((1, 3))
      setting = dataclasses.replace(
        _slow(setting, 0.3, 24), fingerprint_every=every, same_start=True
      )
      return setting, ((time, kind, (index,)),)
    case _:
      return setting, ((time, kind, (index,)),)


def _slow(setting: Setting, compute: float, steps: int) -> Setting:
  """A run that lasts for longer, without more steps than that takes."""
  times = (compute,) * len(setting.compute)
  return dataclasses.replace(setting, compute=times, steps=steps)


def _storm(setting: Setting, time: float, r: random.Random) -> Any:
  """Messages are late on one link and then on another, while leaders change."""
  for _ in range(r.choice((6, 10, 15))):
    kind = r.choice(_STORM)
    index = r.randrange(setting.replicas)
    other = (index + 1 + r.randrange(setting.replicas - 1)) % setting.replicas
    long = r.choice((0.02, 0.1, 0.5))
    match kind:
      case "cut":
        yield time, kind, (index, other, long, False)
      case "break":
        yield time, kind, (index, other)
      case "kill leader":
        yield time, kind, (index, 0.5)
      case _:
        yield time, kind, (index, long)
    time += r.expovariate(1.0 / 0.1)


def _cuts(setting: Setting, index: int, time: float, r: random.Random) -> Any:
  """One host is cut off again and again, some cuts longer than any silence."""
  shape = r.choice(("isolate", "cut"))
  other = (index + 1 + r.randrange(setting.replicas - 1)) % setting.replicas
  both = r.random() < 0.5
  for _ in range(r.choice((3, 5, 8))):
    long = r.choice((8.0, 12.0, 15.0, 45.0))
    if shape == "isolate":
      yield time, shape, (index, long)
    else:
      yield time, shape, (index, other, long, both)
    time += long + r.choice((2.0, 8.0, 16.0))
