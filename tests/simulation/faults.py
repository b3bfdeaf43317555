"""Schedules: a seed gives a setting and its faults; the same seed, the same run."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from typing import Any

from optax_dist.coordinator.protocol import messages as msg
from tests.simulation import nonsense, outages
from tests.simulation.invariants import Checker, Violation
from tests.simulation.world import (
  CONNECT,
  FASTEST,
  SILENCE,
  SILENCE_TIMEOUT,
  Process,
  Setting,
  World,
  digest,
)

# A fault: when, what, and to whom.
Fault = tuple[float, str, tuple[Any, ...]]

# Virtual seconds in which all must be over once faults have stopped.
BOUND = 600.0
# What becomes of a damaged state: a number, as a text differs between processes.
_DAMAGE = 13


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A run that can be repeated: its seed, setting and faults."""

  seed: int
  setting: Setting
  faults: tuple[Fault, ...]


@dataclasses.dataclass(frozen=True)
class Result:
  """The results of a run.

  Attributes:
    schedule: the run.
    steps: committed.
    events: that happened.
    violation: what did not hold; "" if all did.
    trace: the events, if they were asked for.
    transcript: what happened, human-readable, if that was asked for.
    ended: whether the run ended well.
  """

  schedule: Schedule
  steps: int
  events: int
  violation: str
  trace: tuple[str, ...]
  ended: bool
  transcript: tuple[str, ...] = ()


_KINDS = (
  ("kill", 4),
  ("restart", 3),
  ("pause", 4),
  ("stop", 3),
  ("break", 3),
  ("cut", 2),
  ("isolate", 2),
  ("kill coordinator", 10),
  ("kill coordinator twice", 4),
  ("kill amid effects", 6),
  ("lose power", 3),
  ("pause coordinator", 4),
  ("cut off coordinator", 2),
  ("snapshot", 2),
  ("leave", 1),
  ("abort", 1),
  ("save", 1),
  ("lag", 4),
  ("kill amid lag", 3),
)
# What is over in a moment, but for those that are killed.
_BRIEF = ("ends", "kill", "leave", "save", "lag")


# Of a seed divided by 16: longer runs with faults further apart, so that a replica
# can be behind by more steps than the log has kept.
_LONG = (6, 14)
# Of a seed divided by 4: with the faults of `outages`.
_OUTAGES = 3


def schedule(seed: int, steps: int = 0, outage: str = "") -> Schedule:
  """The schedule of a seed.

  Args:
    seed: it.
    steps: of the run; 0: mostly few, with faults in all of them.
    outage: a kind of faults of `outages`; "": those of the seed.
  """
  if not steps and seed % 16 in _LONG:
    steps = 12
  dense = not steps
  steps = steps or random.Random(f"steps {seed}").choice((4, 8, 12))
  r = random.Random(seed)
  replicas = r.choice((2, 3, 3, 3, 4))
  kind = r.random()
  alone = kind < 0.1
  if alone:
    needed = 1
  elif kind < 0.25:
    needed = replicas + r.choice((1, 2))
  else:
    needed = r.choice((1, replicas - 1, replicas, replicas))
  slow = r.random() < 0.3
  setting = Setting(
    replicas=replicas,
    needed=needed,
    inline=r.random() < 0.5,
    alone=alone,
    max_staleness=1000 if alone else r.choice((0, 0, 0, 1, 3)),
    lower_on_leave=r.random() < 0.8,
    lower_on_loss=r.random() < 0.3,
    steps=steps,
    latency=r.choice((0.0005, 0.005, 0.05)),
    compute=tuple(
      0.05 * (10.0 if slow and r.random() < 0.4 else 1.0) for _ in range(8)
    ),
    rates=tuple(r.choice((1.0, 1.0, 0.9, FASTEST)) for _ in range(8)),
    fingerprint_every=r.choice((0, 1, 3)),
    same_start=r.random() < 0.8,
    adaptive=random.Random(f"adaptive {seed}").random() < 0.5,
  )
  if setting.lower_on_leave and needed <= replicas and r.random() < 0.25:
    setting = dataclasses.replace(setting, leaves=True)
  # Steps take about as long as this, so faults strike amid them.
  pace = max(setting.compute) + 4 * setting.latency
  if outage or seed % 4 == _OUTAGES:
    return Schedule(seed, *outages.schedule(seed, setting, pace, outage))
  brings = random.Random(f"starts {seed}")
  if brings.random() < 0.2:
    starts = tuple(brings.choice((0, 0, 1, 3)) for _ in range(8))
    setting = dataclasses.replace(setting, starts=starts)
  faults = []
  time = 0.0
  for _ in range(r.choice((0, 1, 2, 3, 4, 6))):
    time += r.expovariate(1.0 / (3 * pace)) / (3 if dense else 1)
    time += r.choice((0, 0, 0, 5.0))
    kind_ = r.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])[0]
    faults.append((time, kind_, _details(kind_, r, replicas)))
  return Schedule(seed, setting, tuple(faults))


def _details(kind: str, r: random.Random, replicas: int) -> tuple[Any, ...]:
  a = r.randrange(replicas)
  b = (a + 1 + r.randrange(replicas - 1)) % replicas
  short = r.choice((0.01, 0.1, 1.0, SILENCE + 1.0, 3 * SILENCE_TIMEOUT))
  long = r.choice((SILENCE + 1.0, 3 * SILENCE_TIMEOUT, 45.0))
  match kind:
    case "kill coordinator" | "kill coordinator twice":
      # After how long it is started again.
      return (a, r.choice((0.0, 0.01, 0.5, 3.0, 20.0)))
    case "kill amid effects":
      return (a, r.choice((0.01, 0.5)), r.choice((0, 1, 1, 2, 3, 5)))
    case "lose power":
      return (a, r.choice((0.5, 10.0)), r.choice((1, 2, 5)))
    case "kill":
      # After how long a new process takes its place; negative: never.
      return (a, r.choice((0.0, 0.5, 10.0, -1.0)))
    case "restart":
      return (a, r.choice((0.0, 0.02)))
    case "pause" | "pause coordinator" | "cut off coordinator":
      return (a, short)
    case "stop":
      return (a, long)
    case "break":
      return (a, b)
    case "cut":
      return (a, b, short, r.random() < 0.5)
    case "isolate":
      return (a, short)
    case "snapshot":
      return (a, r.choice((1, 2)))
    case "lag":
      return (a, r.choice((0.01, 0.1, 0.5)))
    case "kill amid lag":
      lag = r.choice((0.02, 0.1, 0.5))
      return (a, r.choice((0.01, 0.5, 3.0)), lag, lag * r.random())
    case _:
      return (a,)


def _living(world: World, index: int) -> Process | None:
  for process in reversed(world.all):
    if process.index == index and process.alive and not process.over:
      return process
  return None


def _all_living(world: World) -> list[Process]:
  return [p for p in world.all if p.alive and not p.over]


def can_spare(world: World, index: int) -> bool:
  """Whether steps continue without this replica."""
  setting = world.setting
  living = {p.index for p in world.all if p.alive} - {index}
  if len(living) != setting.replicas - 1:
    return False
  if any(p.wants_leave or p.over for p in world.all):
    return False
  if setting.least < setting.replicas:
    return True
  # One that is still expected is waited for.
  joined = set(world.checker.processes.values())
  known = {p.index for p in world.all if p.name in joined}
  return setting.lower_on_loss and len(known) == setting.replicas


def _can_spare_one_of(world: World) -> bool:
  """Whether steps continue without a replica that is about to end."""
  setting = world.setting
  living = {p.index for p in world.all if p.alive and not p.over}
  if len(living) < setting.replicas or any(p.wants_leave for p in world.all):
    return False
  return setting.least < setting.replicas


def strike(world: World, kind: str, details: tuple[Any, ...]) -> None:
  """Lets a fault happen, where there is something for it to strike."""
  index = details[0]
  if kind == "stranger" and world.checker.commits:
    world.start(index, stranger=True)  # In the place of one that has just died.
  if kind == "never joins":
    world.absent = (index,)
    if world.chief.alive:
      world.input(world.chief, world.launched())
  process = _living(world, index)
  if process is None or kind == "stranger":
    return
  times = [detail for detail in details if isinstance(detail, float)]
  if kind not in _BRIEF:
    # So long it may take until all know of each other again.
    rest = max([0.0, *times]) + world.longest_silence
    rest += CONNECT + SILENCE_TIMEOUT
    world.quiet_at = max(world.quiet_at, world.now + rest)
  match kind:
    case "kill coordinator":
      world.kill(world.chief)
      world.at(world.now + details[1], world.restart_coordinator)
    case "kill coordinator twice":
      world.kill(world.chief)
      world.at(world.now + details[1], world.restart_coordinator)
      again = world.now + details[1] + 3 * world.setting.latency
      world.at(again, strike, world, "kill coordinator", details)
    case "kill amid effects":
      world.chief.dies_after = details[2]
    case "lose power":
      world.lose_power(details[2])
      world.at(world.now + details[1], world.restart_coordinator)
    case "vanish":
      world.vanish(process)
      world.at(world.now + details[1], world.start, process.index)
    case "vanish coordinator":
      world.vanish(world.chief)
      world.at(world.now + details[1], world.restart_coordinator)
    case "half cut coordinator":
      # It can't reach some members that reach it, or the other way round.
      for other in world.all[details[2] :]:
        if other.alive:
          ends = (world.chief, other) if details[3] else (other, world.chief)
          world.cut(*ends, details[1])
    case "one more":
      world.start(world.setting.replicas)
    case "pause coordinator":
      world.pause(world.chief, details[1])
    case "cut off coordinator":
      for other in world.all:
        if other.alive:
          world.cut(world.chief, other, details[1])
          world.cut(other, world.chief, details[1])
    case "kill" | "restart":
      delay = details[1]
      if delay < 0.0 and not can_spare(world, process.index):
        delay = 0.5
      world.kill(process)
      world.spared = world.spared or delay < 0.0
      if delay >= 0.0:
        world.at(world.now + delay, world.start, process.index)
    case "pause" | "stop":
      world.pause(process, details[1])
    case "break":
      other = _living(world, details[1])
      if other is not None:
        world.reset(process, other)
    case "break from coordinator":
      world.reset(world.chief, process)
    case "half a mean":
      process.half_means += details[1]
    case "stuck":
      process.stuck += details[1]
    case "cut members":
      for one, other in itertools.permutations(_all_living(world)[:2], 2):
        world.cut(one, other, details[1])
    case "slow copies":
      world.copies_take = details[1]
    case "slow snapshots":
      world.snapshots_take = details[1]
    case "slow hand-over":
      process.hand_over = details[1]
    case "dies at the end":
      process.dies_at_the_end = True
    case "echo":
      world.has_nonsense = True
      world.echo(process)
    case "nonsense":
      world.has_nonsense = True
      others = [p for p in _all_living(world) if p is not process]
      nonsense.send(world, process, others, random.Random(details[1]))
    case "wrong size":
      process.wrong_sizes += 1
    case "cut":
      other = _living(world, details[1])
      if other is not None:
        world.cut(process, other, details[2])
        if details[3]:
          world.cut(other, process, details[2])
    case "isolate":
      for other in world.all:
        if other is not process and other.alive:
          world.cut(process, other, details[1])
          world.cut(other, process, details[1])
    case "lag":
      world.lag(process, details[1])
    case "kill amid lag":
      world.lag(world.chief, details[2])
      time = world.now + details[3]
      world.at(time, strike, world, "kill coordinator", details)
    case "snapshot":
      process.fail_snapshots += details[1]
    case "leave":
      # With one that is dead for good there may be too few.
      process.wants_leave = not world.spared
    case "save" if process.paused_until > world.now:
      # Its training loop stands still, too.
      process.backlog.append((strike, (world, kind, details)))
    case "save":
      world.checker.save_wanted(process)
      world.input(process, msg.Save())
      process.changes += 1
      world.input(process, msg.SetHyperparams((("rate", world.now),)))
    case "all stop":
      for one in (*world.all, world.chief):
        world.pause(one, details[1])
    case "stop, and die":
      world.pause(process, details[1])
      # It has its events, or not yet.
      moment = details[2]
      world.at(world.now + details[1] + moment, world.kill, process)
      world.at(world.now + details[1] + 1.0, world.start, process.index)
    case "bytes":
      world.has_nonsense = True
      others = [p for p in world.all if p.alive and p is not process]
      for other in others:
        world.garble(process, other, details[1])
    case "crawl":
      world.tell(f"{process.name} sends slowly for {details[1]} s")
      process.crawls_until = world.now + details[1]
    case "twin":
      world.start(process.index)
    case "wrong gradients":
      world.tell(f"{process.name} computes wrong gradients")
      process.is_faulty = True
    case "damage":
      if process.step > 0:
        world.tell(f"the state of {process.name} is damaged")
        world.checker.corrupt = True
        process.version = digest(process.version, _DAMAGE)
        if process.ahead is not None:
          step, version = process.ahead
          process.ahead = (step, digest(version, _DAMAGE))
    case "ends":
      # With exit code 0, and without having left.
      if _can_spare_one_of(world):
        world.tell(f"{process.name} ends without leaving")
        world.spared = True
        world.quit(process)
    case "abort":
      world.tell(f"{process.name} aborts")
      process.aborted = True
      stacks = "where it is stuck" if process.step % 2 else ""
      world.input(process, msg.Leave(True, "an exception", stacks))
      world.quit(process)
      world.at(world.now + 1.0, world.start, process.index)
    case _:
      raise AssertionError(kind)


def _over(time: float, kind: str, details: tuple[Any, ...]) -> float:
  """When a fault is over."""
  return time + max([0.0, *(d for d in details if isinstance(d, float))])


def run(
  schedule: Schedule,
  trace: bool = False,
  world_class: Any = World,
  checker_class: Any = Checker,
  strike: Any = strike,
) -> Result:
  """Runs a schedule to its end, checking all the time."""
  world = world_class(schedule.setting, schedule.seed)
  checker = checker_class(world)
  world.checker = checker
  if trace:
    world.trace, world.transcript = [], []
  # A world is full of cycles, and goes as a whole.
  gc.set_threshold(100_000, 50, 100)
  for time, kind, details in schedule.faults:
    world.at(time, strike, world, kind, details)
    world.add_fault(time, _over(time, kind, details))
  last = max([_over(*fault) for fault in schedule.faults], default=0.0)
  violation = ""
  try:
    pending = lambda: all(p.over or not p.alive for p in world.all)
    world.run(last + 60.0, lambda: False)
    world.run(last + 60.0 + BOUND, pending)
    checker.finish()
  except Violation as error:
    violation = str(error)
  except AssertionError as error:
    violation = f"core: {error}"
  except Exception as error:
    if trace:
      import traceback

      world.say(traceback.format_exc())
    violation = f"raised: {error!r}"
  ended = checker.end is not None and not checker.end.error
  return Result(
    schedule,
    len(checker.commits),
    world.events,
    violation,
    tuple(world.trace or ()),
    ended,
    tuple(world.transcript or ()),
  )
