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
RESIDUES = (1, 5, 9, 15)

Faults = tuple[tuple[float, str, tuple[Any, ...]], ...]


def is_aimed(seed: int) -> bool:
  """Whether the schedule of a seed is from here."""
  return seed % 16 in RESIDUES


def schedule(seed: int, setting: Setting) -> tuple[Setting, Faults]:
  """The setting and the faults of a seed.

  Args:
    seed: it.
    setting: the setting of another schedule.
  """
  r = random.Random(f"moment of {seed}")
  if seed % 16 == RESIDUES[0]:
    return _OFTEN[seed // 16 % len(_OFTEN)](setting, r)
  return r.choice(_MOMENTS)(setting, r)


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
  not_finite = r.choice((0.01, 0.2))
  setting = dataclasses.replace(setting, not_finite=not_finite)
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


def _the_leader_dies_between_fingerprints(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Of a damaged state some have told the leader that dies, and some the next."""
  setting = _small(
    setting,
    inline=r.random() < 0.5,
    replicas=4,
    needed=r.choice((2, 3)),
    lower_on_loss=True,
    compute=(0.3,) * 8,
    fingerprint_every=8,
    # There is no other one to compare before the end.
    steps=15,
  )
  struck = (
    (r.uniform(0.4, 2.0), "damage", (r.randrange(4), 0)),
    (r.uniform(2.6, 3.6), "kill leader", (0, r.choice((-1.0, 0.5)))),
  )
  return setting, struck


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


def _loses_the_leader(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """One replica loses the leader of old, which all others still hear."""
  replicas = r.choice((3, 4))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, replicas - 1, replicas)),
    inline=r.random() < 0.5,
    compute=(1.0,) * 8,
    steps=26,
    latency=r.choice((0.0005, 0.02)),
  )
  slow = r.choice((0.0005, 0.05, 0.2))
  setting = dataclasses.replace(setting, store_latency=slow)
  struck: list[Any] = []
  time = r.uniform(15.5, 18.0)
  for _ in range(r.choice((2, 4))):
    struck.append((time, "break from leader", (r.randrange(replicas),)))
    time += r.choice((0.01, 0.1, 1.0))
  return setting, tuple(struck)


def _far_from_the_store(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The leader hands over to a replica that is nearer to the store."""
  replicas = r.choice((2, 3))
  far = [r.choice((1.0, 4.0, 8.0)) for _ in range(8)]
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, replicas, replicas + 1)),
    inline=r.random() < 0.5,
    store_latency=0.01,
    store_distance=tuple(far),
    max_staleness=r.choice((0, 0, 2)),
    steps=16,
  )
  kinds = ("kill leader", "break from leader", "kill member", "lag", "leave")
  return setting, _some(kinds, replicas, r, 0.1, 0.4)


def _leaves_and_the_leader_changes(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The next leader knows who has left, and who was lost."""
  replicas = r.choice((3, 4))
  setting = _small(
    setting,
    replicas=replicas,
    needed=replicas,
    inline=r.random() < 0.5,
    lower_on_leave=True,
    lower_on_loss=r.random() < 0.5,
    store_latency=r.choice((0.0005, 0.05)),
    steps=12,
  )
  goes = r.choice(("leave", "leave", "kill member"))
  time = r.uniform(0.1, 0.3)
  gone = (time, goes, (r.randrange(replicas), 10.0))
  kinds = ("kill leader", "restart", "pause leader")
  return setting, (gone, *_some(kinds, replicas, r, time + 0.02, 0.3))


def _late_gradients(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Gradients of steps before count, while attempts fail and leaders change."""
  replicas = r.choice((3, 4))
  slow = [0.05] * 8
  slow[r.randrange(replicas)] = r.choice((0.08, 0.15, 0.25))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, 2, replicas - 1, replicas + 1)),
    inline=r.random() < 0.5,
    max_staleness=r.choice((1, 2, 4)),
    compute=tuple(slow),
    latency=r.choice((0.0005, 0.01)),
    steps=20,
  )
  kinds = ("half a mean", "half a mean", "kill leader", "break", "kill member")
  return setting, _some(kinds, replicas, r, 0.1, 0.2)


def _begins_again(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """All die before the first step, or with it; some come back late."""
  replicas = r.choice((2, 3))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, replicas)),
    inline=r.random() < 0.5,
    same_start=r.random() < 0.3,
    lower_on_loss=r.random() < 0.5,
    compute=(0.5,) * 8,
    steps=4,
  )
  time, struck = r.uniform(0.02, 0.8), []
  for index in range(replicas):
    back = r.choice((0.0, 0.5, 3.0, 12.0))
    struck.append((time, "kill", (index, back)))
    time += r.choice((0.0, 0.0, 0.01, 0.3))
  if r.random() < 0.5:
    struck.append((time + 12.0, "kill leader", (0, 0.5)))
  return setting, tuple(struck)


def _comes_at_the_end(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A process joins while the run ends."""
  setting = _small(
    setting,
    needed=r.choice((1, 2)),
    inline=r.random() < 0.5,
    steps=6,
    latency=r.choice((0.0005, 0.02)),
    leaves=setting.lower_on_leave and r.random() < 0.3,
  )
  time, index = r.uniform(0.1, 0.35), r.randrange(3)
  struck: list[Any] = [(time, "kill", (index, r.choice((0.02, 0.1, 0.3))))]
  if r.random() < 0.5:
    struck.append((0.0, "slow copies", (index, r.choice((0.05, 0.5)))))
  kinds = ("break from leader", "snapshot", "kill leader", "cut to leader")
  return setting, (*struck, *_some(kinds, 3, r, time, 0.2))


def _a_snapshot_amid_an_attempt(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """A snapshot is served while attempts fail, and its source is lost."""
  replicas = r.choice((3, 4))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, 2, replicas - 1)),
    inline=r.random() < 0.3,
    lower_on_loss=r.random() < 0.5,
    latency=r.choice((0.0005, 0.005)),
    steps=16,
  )
  time, index = r.uniform(0.1, 0.3), r.randrange(replicas)
  struck: list[Any] = [
    (0.0, "slow copies", (index, r.choice((0.02, 0.1, 0.5)))),
    (time, "kill", (index, r.choice((0.0, 0.1)))),
  ]
  kinds = ("half a mean", "half a mean", "kill member", "snapshot", "break")
  return setting, (*struck, *_some(kinds, replicas, r, time, 0.2))


def _single_gradients(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Steps of one gradient: its copy, and who applies them one by one."""
  replicas = r.choice((2, 3))
  alone = r.random() < 0.5
  setting = _small(
    setting,
    replicas=replicas,
    needed=1,
    alone=alone,
    max_staleness=1000 if alone else r.choice((0, 1)),
    inline=r.random() < 0.3,
    lower_on_loss=r.random() < 0.5,
    latency=r.choice((0.0005, 0.01)),
    steps=20,
  )
  kinds = ("kill member", "kill leader", "half a mean", "cut to leader", "lag")
  return setting, _some(kinds, replicas, r, 0.05, 0.2)


def _the_store_fails_the_leader(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Answers of the store are lost while the leader decides much at once."""
  replicas = r.choice((2, 3))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, replicas)),
    inline=r.random() < 0.5,
    adaptive=False,
    steps=16,
  )
  struck: list[Any] = []
  time = 0.05
  for _ in range(r.choice((2, 4))):
    time += r.uniform(0.0, 0.3)
    many = tuple(
      r.choice(("answer lost", "request lost", "late"))
      for _ in range(r.choice((1, 2, 3)))
    )
    struck.append((time, "store of leader", (r.randrange(replicas), many)))
  kinds = ("break from leader", "leave", "kill member", "pause leader")
  return setting, (*struck, *_some(kinds, replicas, r, 0.1, 1.0))


def _amid_a_slow_attempt(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """Replicas come, go and fail while a mean is on its way for long."""
  replicas = r.choice((3, 4))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, 2, replicas - 1, replicas + 1)),
    inline=False,
    max_staleness=r.choice((0, 0, 2)),
    lower_on_leave=True,
    lower_on_loss=r.random() < 0.5,
    latency=r.choice((0.0005, 0.01)),
    steps=10,
  )
  time = r.uniform(0.05, 0.3)
  crawls = (r.randrange(replicas), r.choice((2.0, 6.0, 15.0)))
  struck = [(time, "crawl", crawls)]
  kinds = (
    "kill member",
    "kill leader",
    "restart",
    "leave",
    "break",
    "break from leader",
    "half a mean",
    "snapshot",
  )
  return setting, (*struck, *_some(kinds, replicas, r, time, 2.0))


def _amid_a_slow_put(
  setting: Setting, r: random.Random
) -> tuple[Setting, Faults]:
  """The same while decisions are on their way to the log for long."""
  replicas = r.choice((2, 3, 4))
  setting = _small(
    setting,
    replicas=replicas,
    needed=r.choice((1, 2, replicas, replicas + 1)),
    inline=r.random() < 0.5,
    lower_on_leave=True,
    lower_on_loss=r.random() < 0.5,
    store_latency=r.choice((0.2, 0.6)),
    leaves=r.random() < 0.3,
    steps=8,
  )
  kinds = (
    "kill member",
    "kill leader",
    "restart",
    "leave",
    "break from leader",
    "break from leader",
    "pause leader",
    "save",
  )
  return setting, _some(kinds, replicas, r, r.uniform(1.0, 3.0), 0.6)


def _nonsense(setting: Setting, r: random.Random) -> tuple[Setting, Faults]:
  """A member sends what nobody should send, to the leader and to others."""
  setting = _small(
    setting,
    inline=r.random() < 0.5,
    needed=r.choice((1, 2, 4)),
    lower_on_loss=True,
    steps=16,
  )
  kinds = ("nonsense", "nonsense", "nonsense", "wrong size")
  return setting, _some(kinds, 3, r, 0.1, 0.1)


def _some(
  kinds: tuple[str, ...],
  replicas: int,
  r: random.Random,
  first: float,
  apart: float,
) -> Faults:
  """Some faults, close to each other."""
  struck, time = [], first
  for _ in range(r.choice((1, 2, 3, 5))):
    time += apart * r.random()
    index = r.randrange(replicas)
    kind = r.choice(kinds)
    struck.append((time, kind, _details(kind, index, replicas, r)))
  return tuple(struck)


def _details(
  kind: str, index: int, replicas: int, r: random.Random
) -> tuple[Any, ...]:
  match kind:
    case "kill leader" | "restart":
      return index, r.choice((0.0, 0.1, 0.5))
    case "kill member":
      return index, r.choice((0.0, 0.5, -1.0))
    case "half a mean" | "snapshot":
      return index, r.choice((1, 2))
    case "break":
      return index, (index + 1 + r.randrange(replicas - 1)) % replicas
    case "lag" | "cut to leader":
      return index, r.choice((0.01, 0.1, 0.5))
    case "pause leader":
      return index, r.choice((0.1, SILENCE + 1.0))
    case _:
      return index, r.randrange(1000)


# Those of every fourth seed, by turns.
_OFTEN = (_a_member_dies_at_once, _amid_a_slow_attempt, _amid_a_slow_put)
_MOMENTS = (
  _a_member_dies_at_once,
  _loses_the_leader,
  _far_from_the_store,
  _leaves_and_the_leader_changes,
  _leaves_and_the_leader_changes,
  _late_gradients,
  _late_gradients,
  _begins_again,
  _comes_at_the_end,
  _a_snapshot_amid_an_attempt,
  _a_snapshot_amid_an_attempt,
  _single_gradients,
  _the_store_fails_the_leader,
  _nonsense,
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
  _dies_at_the_end,
  _the_leader_dies_between_fingerprints,
  _leaves_and_calls_again,
  _only_one_lives,
)
