"""Faults that a schedule has in a setting of its own, one kind at a time.

What lasts longer than any deadline, what members say that they should not, and what
goes wrong beside the coordinator. Where one replica is away for longer than the run
waits, the others must not need it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.simulation.world import (
  SILENCE,
  SILENCE_TIMEOUT,
  TIMEOUT,
  TRANSFER_TIMEOUT,
  Setting,
)

# Longer than a replica waits for anything.
BEYOND = TIMEOUT + 3 * SILENCE_TIMEOUT + TRANSFER_TIMEOUT + 15.0

_KINDS = (
  "all stop",
  "bytes",
  "break from coordinator",
  "crawl",
  "cut again",
  "cut members",
  "damage",
  "dies at the end",
  "echo",
  "half a mean",
  "half cut coordinator",
  "nonsense",
  "one more",
  "save",
  "slow copies",
  "slow hand-over",
  "slow snapshots",
  "stop beyond",
  "stop, and die",
  "storm",
  "stranger",
  "strangers first",
  "stuck",
  "twin",
  "vanish",
  "vanish coordinator",
  "wrong size",
)
# What strikes again and again within a moment, and how long it lasts.
_STORM = ("cut", "cut", "cut", "lag", "pause", "break", "kill coordinator")
_BYTES = ("truncated", "longer", "another version", "random", "empty")

Faults = tuple[tuple[float, str, tuple[Any, ...]], ...]


def schedule(
  seed: int, setting: Setting, pace: float, only: str = ""
) -> tuple[Setting, Faults]:
  """The setting and the faults of a seed.

  Args:
    seed: it.
    setting: the setting of another schedule.
    pace: seconds that its steps take, about.
    only: the kind of faults; "": any.
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
  kind = only or r.choice(_KINDS)
  if not only and random.Random(f"comes back {seed}").random() < 0.1:
    kind = "comes back"
  replicas = setting.replicas
  index = r.randrange(replicas)
  # Mostly amid a step, and sometimes in a run that has just begun.
  time = r.choice((0.0, 0.2, 1.0)) + r.expovariate(1.0 / (3 * pace))
  later = time + r.expovariate(1.0 / pace)
  restart = (later, "kill coordinator", (index, r.choice((0.0, 0.5))))
  match kind:
    case "all stop":
      long = r.choice((2.0, SILENCE + 2.0, 20.0, 60.0, BEYOND))
      times = [time + i * (long + r.choice((1.0, 5.0))) for i in range(2)]
      return setting, tuple((at, kind, (index, long)) for at in times)
    case "stop beyond":
      # The others go on, or fail for good reason.
      needed = min(setting.needed, replicas - 1)
      setting = dataclasses.replace(setting, needed=needed)
      return setting, ((time, "stop", (index, BEYOND)),)
    case "cut again":
      setting = _slow(setting, 1.0, 24)
      setting = dataclasses.replace(setting, adaptive=True)
      return setting, tuple(_cuts(setting, index, time, r))
    case "stop, and die":
      moment = r.choice((0.0, 0.001, 0.05))
      long = r.choice((1.0, SILENCE + 1.0, 3 * SILENCE_TIMEOUT))
      return setting, ((time, kind, (index, long, moment)),)
    case "bytes":
      struck = [
        (time + 0.1 * i, kind, (r.randrange(replicas), how))
        for i, how in enumerate(_BYTES)
      ]
      return setting, tuple(struck)
    case "nonsense":
      numbers = [r.randrange(10**6) for _ in range(3)]
      struck = [
        (time + 0.1 * i, kind, (index, n)) for i, n in enumerate(numbers)
      ]
      return setting, tuple(struck)
    case "crawl":
      # For longer than the coordinator waits until it asks, and sent all the time.
      setting = dataclasses.replace(
        setting, inline=False, alone=False, needed=max(2, setting.needed)
      )
      return setting, ((time, kind, (index, 3 * TRANSFER_TIMEOUT)),)
    case "storm":
      return setting, tuple(_storm(setting, time, r))
    case "twin":
      # Until the two could have replaced each other some times.
      setting = _slow(setting, 1.0, 30)
      return setting, ((time, kind, (index,)),)
    case "stranger":
      # It takes the place of one that has just died.
      dies = (time + 0.1, "kill", (index, 45.0))
      return setting, (dies, (time + 0.2, kind, (index,)))
    case "vanish" | "vanish coordinator":
      # It is there again before others can have noticed, or long after.
      struck = [
        (at, kind, (index, r.choice((0.5, 3.0, 20.0))))
        for at in (time, time + r.choice((1.0, 40.0)))
      ]
      return setting, tuple(struck)
    case "half cut coordinator":
      long = r.choice((1.0, 8.0, 20.0, 45.0))
      some, to = r.randrange(replicas), r.random() < 0.5
      return setting, ((time, kind, (index, long, some, to)), restart)
    case "strangers first":
      replicas = max(replicas, 3)
      setting = dataclasses.replace(
        setting,
        replicas=replicas,
        needed=1 if setting.alone else r.randrange(1, replicas),
        strangers=(r.randrange(replicas),),
      )
      return setting, (restart,) if r.random() < 0.3 else ()
    case "damage":
      setting = dataclasses.replace(
        _slow(setting, 0.3, 24),
        fingerprint_every=r.choice((1, 3)),
        same_start=True,
      )
      return setting, ((time, kind, (index,)),)
    case "cut members":
      setting = dataclasses.replace(setting, inline=False)
      if not setting.alone and r.random() < 0.5:
        # One has a gradient, and can't have the state that it counts for.
        setting = dataclasses.replace(setting, needed=1, max_staleness=3)
      struck = [(time, kind, (index, r.choice((1.0, 20.0, 45.0))))]
      if r.random() < 0.5:
        struck.append((later, "kill", (r.randrange(2), 0.5)))
      return setting, tuple(struck)
    case "slow copies":
      behind = (time, "snapshot", ((index + 1) % replicas, 1))
      again = (time, "restart", ((index + 1) % replicas, 0.02))
      slow = (0.0, kind, (index, r.choice((0.05, 0.5, 5.0))))
      return setting, (slow, behind, again, restart)
    case "slow snapshots":
      setting = _slow(setting, 0.5, 30)
      slow = (0.0, kind, (index, r.choice((3.0, 15.0))))
      dies = (time, "kill", (index, 0.5))
      return setting, (slow, dies, (time + 10.0, *dies[1:]))
    case "slow hand-over":
      setting = dataclasses.replace(setting, not_finite=r.choice((0.01, 0.2)))
      slow = [(0.0, kind, (i, r.choice((0.01, 0.1)))) for i in range(replicas)]
      return setting, (*slow, restart)
    case "half a mean":
      setting = dataclasses.replace(setting, inline=False)
      return setting, ((time, kind, (index, r.choice((1, 2)))), restart)
    case "stuck":
      # Mostly in rounds that are announced early.
      setting = dataclasses.replace(setting, inline=False, alone=False)
      setting = dataclasses.replace(setting, needed=setting.replicas)
      return setting, ((time, kind, (index, r.choice((1, 2)))),)
    case "comes back":
      # The others need not wait until it computes again.
      setting = dataclasses.replace(
        _slow(setting, r.choice((0.05, 0.5)), 24),
        replicas=max(replicas, 3),
        needed=1 if setting.alone else max(replicas, 3),
        max_staleness=setting.max_staleness if setting.alone else 0,
        lower_on_loss=True,
        compiling=r.choice((0.0, 3.0)),
      )
      return setting, (*_kills(setting, time, r), restart)
    case "echo" | "save":
      return setting, ((time, kind, (index,)), restart)
    case _:
      return setting, ((time, kind, (index,)),)


def _slow(setting: Setting, compute: float, steps: int) -> Setting:
  """A run that lasts for longer, without more steps than that takes."""
  times = (compute,) * len(setting.compute)
  return dataclasses.replace(setting, compute=times, steps=steps)


def _kills(setting: Setting, time: float, r: random.Random) -> Any:
  """One after the other dies, and is back amid the steps of those that live."""
  for _ in range(r.choice((2, 4, 6))):
    yield time, "kill", (r.randrange(setting.replicas), r.choice((0.0, 0.5)))
    time += 0.6 + r.expovariate(1.0)


def _storm(setting: Setting, time: float, r: random.Random) -> Any:
  """Messages are late on one link and then on another, while it starts again."""
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
      case _:
        yield time, kind, (index, long)
    time += r.expovariate(1.0 / 0.1)


def _cuts(setting: Setting, index: int, time: float, r: random.Random) -> Any:
  """One host is cut off again and again, some cuts longer than any silence."""
  shape = r.choice(("isolate", "cut", "cut off coordinator"))
  other = (index + 1 + r.randrange(setting.replicas - 1)) % setting.replicas
  both = r.random() < 0.5
  for _ in range(r.choice((3, 5, 8))):
    long = r.choice((8.0, 12.0, 15.0, 45.0))
    if shape == "cut":
      yield time, shape, (index, other, long, both)
    else:
      yield time, shape, (index, long)
    time += long + r.choice((2.0, 8.0, 16.0))
