"""Schedules that aim at one moment, which the other ones hardly ever meet.

They are in schedules of their own, so that all others stay what they were.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.simulation.world import (
  ATTEMPT_TIMEOUT,
  CONNECT,
  SILENCE,
  TIMEOUT,
  Setting,
)

# Of a seed divided by 16: those whose schedules are from here.
RESIDUE = 5

Faults = tuple[tuple[float, str, tuple[Any, ...]], ...]


def schedule(
  seed: int, setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The setting and the faults of a seed.

  Args:
    seed: it.
    setting: the setting of another schedule.
    r: numbers that are drawn for this one.
  """
  which = random.Random(f"moment of {seed}")
  if which.random() < 0.3:
    return _a_member_dies_at_once(setting, r)
  moment = which.choice(_MOMENTS)
  if moment is _computes_for_ever and which.random() < 0.5:
    moment = _dies_at_the_end
  return moment(setting, which)


def _small(setting: Setting, **fields: Any) -> Setting:
  """Three replicas, of which two take steps, fast and with nothing special."""
  plain = {
    "replicas": 3,
    "needed": 2,
    "alone": False,
    "max_staleness": 0,
    "latency": 0.0005,
    "store_latency": 0.0005,
    "compute": (0.05,) * 8,
    "leaves": False,
    **fields,
  }
  return dataclasses.replace(setting, **plain)


def _a_member_dies_at_once(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The leader dies when another replica has its last commits, unread yet.

  The rest of a mean is lost with that leader.
  """
  setting = _small(
    setting,
    needed=1,
    inline=False,
    lower_on_loss=True,
    latency=r.choice((0.0005, 0.005)),
    leaves=setting.lower_on_leave and r.random() < 0.5,
  )
  time = r.uniform(0.1, 0.5)
  lag = r.choice((0.02, 0.1, 0.5))
  again = r.choice((0.5, 10.0, -1.0))
  details = (r.randrange(3), again, lag, lag * r.random())
  return setting, ((time, "kill amid lag", details),)


def _behind_a_new_leader(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A replica lacks more records than a new leader tells it."""
  setting = _small(setting, compute=(0.3,) * 8, steps=30, adaptive=False)
  index, time = r.randrange(3), r.uniform(0.2, 1.0)
  dies = time + SILENCE - r.choice((0.02, 0.2, 1.0))
  cut = (time, "cut from leader", (index, SILENCE + 2.0))
  return setting, (cut, (dies, "kill leader", (index, 0.5)))


def _behind_at_the_end(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A replica waits for a snapshot, while its fingerprints come, and the end."""
  index = r.randrange(3)
  other = (index + 1 + r.randrange(2)) % 3
  compute = [0.05] * 8
  compute[index] = 30.0
  setting = _small(
    setting,
    inline=False,
    fingerprint_every=1,
    steps=r.choice((2, 3, 4)),
    compute=tuple(compute),
    leaves=setting.lower_on_leave and r.random() < 0.2,
  )
  # Mostly at the last step, of which one replica misses a part.
  time = 0.04 + 0.065 * setting.steps + r.uniform(-0.05, 0.05)
  struck = [
    (0.0, "slow copies", (index, r.choice((3.0, 6.0)))),
    (time, "crawl", (other, 1.0)),
    (time + r.uniform(0.1, 0.9) * ATTEMPT_TIMEOUT / 3, "break", (index, other)),
  ]
  if r.random() < 0.3:
    time += ATTEMPT_TIMEOUT / 3 + r.uniform(0.0, 2.0)
    struck.append((time, "break from leader", (index,)))
  return setting, tuple(struck)


def _claims(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """A replica claims leadership, and learns late that it has it.

  The leader of before is back by then, and claims it again.
  """
  replicas = r.choice((2, 2, 3))
  setting = _small(
    setting,
    adaptive=False,
    replicas=replicas,
    needed=r.choice((1, replicas, replicas + 1)),
    inline=r.random() < 0.5,
    compute=(0.5,) * 8,
    steps=10,
    latency=r.choice((0.0005, 0.01)),
    store_latency=r.choice((0.0005, 0.02)),
  )
  time, index = r.uniform(0.2, 1.0), r.randrange(replicas)
  claim = time + SILENCE
  back = SILENCE + r.uniform(0.01, 1.9)
  struck: list[Any] = [(time, "pause leader", (index, back))]
  for replica in range(replicas):
    lost = ("answer lost",) * r.choice((1, 1, 2))
    struck.append((claim - 0.05, "store", (replica, lost)))
  for _ in range(r.choice((0, 0, 2))):
    kind = r.choice(("lag", "pause", "break from leader"))
    details = (r.randrange(replicas), r.choice((0.02, 0.1, 1.0)))
    struck.append((claim + r.uniform(0.0, 2.0), kind, details))
  return setting, tuple(struck)


def _one_number(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """Two processes have the same number for longer than one may be dead."""
  setting = _small(setting, compute=(1.0,) * 8, steps=24)
  setting = dataclasses.replace(setting, inline=r.random() < 0.5)
  return setting, ((r.uniform(0.2, 3.0), "twin", (r.randrange(3),)),)


def _apart(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """Two members can't reach each other, and the leader reaches both."""
  setting = _small(
    setting,
    inline=False,
    needed=r.choice((2, 3)),
    lower_on_loss=True,
    steps=20,
    replicas=r.choice((3, 4)),
    compute=(0.5,) * 8,
  )
  long = 6 * CONNECT + r.choice((0.0, 20.0))
  return setting, ((r.uniform(0.2, 2.0), "cut members", (0, long)),)


def _half_a_mean(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """A part of a mean reaches some, and not all; the leader hears of it late."""
  replicas = r.choice((3, 4))
  setting = _small(
    setting,
    inline=False,
    replicas=replicas,
    needed=r.choice((2, 2, 3)),
    steps=20,
    latency=r.choice((0.0005, 0.005)),
    max_staleness=r.choice((0, 0, 2)),
    lower_on_loss=r.random() < 0.5,
  )
  struck: list[Any] = []
  time = 0.0
  for _ in range(r.choice((2, 4))):
    time += r.uniform(0.1, 0.4)
    index = r.randrange(replicas)
    struck.append((time, "half a mean", (index, r.choice((1, 2)))))
    if r.random() < 0.6:
      cut = (r.randrange(replicas), r.choice((0.05, 0.3)))
      kind = r.choice(("cut to leader", "cut from leader"))
      struck.append((time + r.uniform(0.0, 0.1), kind, cut))
  return setting, tuple(struck)


def _sums(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """Leaders change while replicas add to sums that one leader has a part of."""
  replicas = r.choice((2, 3))
  slow = [0.05] * 8
  slow[r.randrange(replicas)] = r.choice((0.05, 0.3))
  setting = _small(
    setting,
    replicas=replicas,
    needed=replicas + r.choice((1, 2, 3)),
    inline=r.random() < 0.5,
    max_staleness=r.choice((0, 2)),
    compute=tuple(slow),
    steps=12,
  )
  struck: list[Any] = []
  if r.random() < 0.5:
    struck = [(0.0, "slow hand-over", (i, 0.05)) for i in range(replicas)]
  time = 0.1
  for _ in range(r.choice((2, 4))):
    time += r.uniform(0.0, 0.6)
    kind = r.choice(("kill leader", "break from leader", "echo", "restart"))
    struck.append((time, kind, (r.randrange(replicas), 0.5)))
  return setting, tuple(struck)


def _late_and_twice(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Submissions are handed over late, and messages come twice."""
  replicas = r.choice((2, 3))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, replicas)),
    inline=r.random() < 0.5,
    max_staleness=r.choice((0, 0, 2)),
    steps=16,
  )
  struck: list[Any] = [
    (0.0, "slow hand-over", (i, r.choice((0.01, 0.1)))) for i in range(replicas)
  ]
  time = 0.1
  for _ in range(r.choice((3, 6))):
    time += r.uniform(0.0, 0.3)
    kind = r.choice(("echo", "echo", "half a mean", "break from leader"))
    struck.append((time, kind, (r.randrange(replicas), 1)))
  return setting, tuple(struck)


def _hangs(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """A process is there, and says nothing for longer than anybody waits."""
  setting = _small(
    setting,
    inline=r.random() < 0.3,
    needed=r.choice((1, 2)),
    steps=12,
    compute=(0.5,) * 8,
  )
  long = r.choice((4 * ATTEMPT_TIMEOUT, TIMEOUT / 2))
  time = r.uniform(0.2, 2.0)
  return setting, ((time, "lag", (r.randrange(3), long)),)


def _computes_for_ever(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A gradient takes longer than the run waits."""
  compute = [0.5] * 8
  compute[r.randrange(3)] = 3 * TIMEOUT
  setting = _small(setting, needed=3, compute=tuple(compute))
  return setting, ()


def _foreign_values(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Something that no replica wrote stands where the log goes on."""
  setting = _small(
    setting, inline=r.random() < 0.5, steps=16, store_latency=0.005
  )
  struck = []
  time = r.choice((0.0, 0.1))
  for _ in range(r.choice((1, 2, 4))):
    time += r.uniform(0.01, 0.3)
    struck.append((time, "foreign value", (r.randrange(3),)))
  if r.random() < 0.6:
    struck.append((time + r.uniform(0.0, 0.2), "kill leader", (0, 0.5)))
  return setting, tuple(struck)


def _leaves_and_calls_again(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The connection to the leader breaks when a replica is let go."""
  setting = _small(
    setting, lower_on_leave=True, steps=8, latency=r.choice((0.0005, 0.02))
  )
  time, index = r.uniform(0.1, 0.3), r.randrange(3)
  struck = [(time, "leave", (index,))]
  for _ in range(3):
    time += r.uniform(0.0, 0.06)
    struck.append((time, "break from leader", (index,)))
  return setting, tuple(struck)


def _dies_at_the_end(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A member is lost between the end of the run and its leader's last word."""
  setting = _small(setting, steps=6, store_latency=r.choice((0.01, 0.05)))
  return setting, ((r.uniform(0.2, 0.5), "dies at the end", (0,)),)


def _only_one_lives(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """All are lost, and the leader's own training loop is the last."""
  setting = _small(setting, lower_on_loss=True, needed=r.choice((1, 2, 3)))
  time = r.uniform(0.2, 0.5)
  return setting, (
    (time, "kill members", (0,)),
    (time + r.choice((0.0, 1.0)), "leader aborts", (0,)),
  )


_MOMENTS = (
  _behind_a_new_leader,
  _behind_at_the_end,
  _claims,
  _one_number,
  _apart,
  _half_a_mean,
  _half_a_mean,
  _sums,
  _sums,
  _late_and_twice,
  _hangs,
  _computes_for_ever,
  _foreign_values,
  _leaves_and_calls_again,
  _only_one_lives,
)
