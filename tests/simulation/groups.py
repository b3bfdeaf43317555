"""Replicas of several processes in the simulated world.

Process 0 of each replica runs the core behind a `RankZero`, the others are
`WorkerRank`s. Each process has shards of its own, so a version is one of a rank:
process r must hold what process r of every other replica holds. A process that
is lost takes its replica with it; a launcher ends what is left of it and starts
all of it again.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.extras.groups.rank_zero import RankZero
from optax_dist.coordinator.extras.groups.worker_rank import WorkerRank
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.client.client import Client
from tests.simulation import faults, leases
from tests.simulation.invariants import FORGOTTEN, Checker
from tests.simulation.world import (
  SILENCE,
  SILENCE_TIMEOUT,
  Process,
  World,
)

# Processes of each replica.
SIZE = 2
# Events of a training loop; the other processes read as many as process 0.
_TOLD = {
  fx.Publish,
  fx.Restore,
  fx.Admitted,
  fx.Suspended,
  fx.Leased,
  fx.Progressed,
  fx.SetRequested,
  msg.Call,
  fx.Taken,
  fx.Resolved,
  fx.Left,
  fx.Finished,
}


class GroupProcess(Process):
  """A process of a replica with several.

  Attributes:
    rank: its number in the replica.
    names: of all processes of the replica.
    told: how many events its training loop was told.
    calls: how often its training loop has looked at them.
    orders: what its training loop is to do as that of process 0 does, and what
      that had been notified of.
  """

  def __init__(
    self,
    world: World,
    names: tuple[str, ...],
    rank: int,
    index: int,
    start: int,
  ):
    super().__init__(world, names[rank], index, start)
    self.rank, self.names = rank, names
    self.told = self.calls = 0
    self.commands: list[tuple[tuple[str, ...], Process]] = []
    places = [(name, f"at {name}") for name in names]
    if rank:
      self.node: Any = WorkerRank(names[0])
      return
    self.me = dataclasses.replace(
      self.me, address=commands.join_addresses(places)
    )
    timeout = self.config.deadlines.timeout
    self.node = RankZero(Client(self.config, self.me), places[1:], timeout)


class GroupWorld(World):
  """A world whose replicas have several processes."""

  def __init__(self, *args: Any, **keywords: Any):
    self.cleared: set[tuple[str, ...]] = set()
    # Replicas that are not started again.
    self.gone: set[int] = set()
    # What process 0's training loop looked for, by its name and call.
    self.looks: dict[tuple[str, int], tuple[Any, ...]] = {}
    super().__init__(*args, **keywords)

  # Processes.

  def start(self, index: int) -> Any:
    life = sum(p.index == index and p.rank == 0 for p in self.all)
    first = f"{'abcdefgh'[index]}{life}"
    names = (first, *(f"{first}.{rank}" for rank in range(1, SIZE)))
    state = self.brought(index)
    for rank, name in enumerate(names):
      process = GroupProcess(self, names, rank, index, state)
      self.all.append(process)
      self.by_name[name] = process
      self.say(f"{name} starts")
      # Process 0 gets through to nobody before that has begun.
      delay = 0.0 if rank else self.delay(self.setting.latency)
      started = ins.Started()
      self.at(self.now + delay, self.input, process, started)
    return self.by_name[first]

  def close(self, process: Any, how: str, reason: str) -> None:
    lived = process.alive and not process.over
    super().close(process, how, reason)
    if lived and process is not self.chief:
      time = self.now + 0.5 * self.random.random()
      self.at(time, self.clear, process.names, process.index)

  def clear(self, names: tuple[str, ...], index: int) -> None:
    """The launcher: the replica ends as a whole, and is started again."""
    group = [self.by_name[name] for name in names]
    if names in self.cleared or any(p.over for p in group):
      return
    self.cleared.add(names)
    for process in group:
      self.kill(process)
    if index not in self.gone:
      self.at(self.now + 0.5, self.start, index)

  def effect(self, process: Any, effect: Any) -> None:
    if type(effect) in _TOLD:
      process.told += 1
    super().effect(process, effect)

  def on_endgroup(self, process: Any, effect: commands.EndGroup) -> None:
    self.close(process, "left", effect.reason)

  # Training loops.

  def next_gradient(self, process: Any) -> None:
    if process.rank:
      self.follow(process)
    else:
      super().next_gradient(process)

  def act(self, process: Any, what: str, *how: str) -> None:
    """Process 0's training loop decides by the events it has had so far."""
    self.looks[process.name, process.calls] = (what, *how)
    self.input(process, commands.Advance(process.calls, process.told))
    process.calls += 1
    super().act(process, what, *how)

  def on_advance(self, process: Any, effect: commands.Advance) -> None:
    assert effect.call == process.calls, "the training loops differ"
    assert effect.events == process.told, "they were told different events"
    process.calls += 1
    seen = object.__new__(type(process))
    seen.__dict__.update(process.__dict__)
    seen.answers = dict(process.answers)
    seen.joined = dataclasses.replace(process.joined)
    what = self.looks[process.names[0], effect.call]
    process.commands.append((what, seen))
    self.follow(process)

  def follow(self, process: Any) -> None:
    """Another process's training loop does what that of process 0 did."""
    while process.alive and not (process.over or process.busy):
      if not process.commands:
        return
      (what, *how), seen = process.commands.pop(0)
      submission = process.submission
      submission.seen = submission.draws.seen = seen
      getattr(self, what)(process, seen, *how)
      submission.seen = submission.draws.seen = process

  def computed(self, process: Any) -> None:
    if not process.rank or process.paused_until > self.now:
      super().computed(process)
      return
    process.busy = False
    self.follow(process)


class GroupChecker(Checker):
  """The same guarantees; A4 and A7 hold for every process of a replica.

  Attributes:
    versions_of: after each step, by rank.
    progress: what each process 0 was told of samples, by its name.
  """

  def __init__(self, world: Any):
    super().__init__(world)
    self.versions_of: dict[int, dict[int, int]] = {}
    self.progress: dict[str, list[fx.Progressed]] = {}

  def began(self, step: int) -> None:
    super().began(step)
    self.versions_of.clear()

  def forget_steps(self, step: int) -> None:
    super().forget_steps(step)
    for known in self.versions_of.values():
      for old in [s for s in known if s > step]:
        del known[old]

  def group(self, name: str) -> list[Any]:
    return [self.world.by_name[n] for n in self.world.by_name[name].names]

  def check_members_have_the_mean(self, commit: Any) -> None:
    for part in commit.parts:
      first = self.members.get(part.incarnation)
      for process in self.group(first) if first else ():
        if process.alive and not process.over:
          aggregation = process.aggregations.get(commit.round)
          owners = {part.incarnation for part in commit.parts}
          if aggregation is None or len(aggregation.means) < len(owners):
            self.fail("A1", f"{process.name} has no mean of {commit.round}")

  def named(self, name: str, process: Any) -> str:
    group = self.world.by_name[name].names if name else ("",)
    return group[process.rank if process is not None else 0]

  def missed_a_new_beginning(self, process: Any) -> bool:
    # What companions still apply is of before: they hear it after process 0.
    if process.rank and self.beginnings > 1:
      return True
    first = self.world.by_name[process.names[0]]
    return bool(first.node.core._known.beginnings < self.beginnings)

  def committed(self, process: Any, commit: Any) -> None:
    super().committed(process, commit)
    for part in commit.parts:
      for process in self.group(self.processes[part.incarnation])[1:]:
        result = self.submissions.get((process.name, part.sequence))
        if result is None:
          self.fail("A1", f"{process.name} never submitted {part}")
        elif not result.submitted.finite:
          self.fail("A1", f"{process.name}: {part} is not finite")

  def published(self, process: Any) -> None:
    if self.missed_a_new_beginning(process):
      return
    step, version = process.step, process.version
    if step > len(self.commits):
      self.fail("A7", f"{process.name} is at step {step}, not committed")
    versions = self.versions_of.setdefault(process.rank, {})
    if versions.setdefault(step, version) != version:
      self.fail("A4", f"{process.name} differs at step {step}")
    if not process.rank:
      self.holders.setdefault(step, set()).add(process.name)

  def admitted(self, process: Any, effect: fx.Admitted) -> None:
    process.settled_at = self.world.now
    current = self.members.get(effect.incarnation) == process.names[0]
    if process.step == 0 and current:
      versions = self.versions_of.setdefault(process.rank, {})
      if versions.setdefault(0, process.version) != process.version:
        self.fail("A4", f"{process.name} starts from another state")
    if not process.rank:
      self.holders.setdefault(process.step, set()).add(process.name)

  def progressed(self, process: Any, effect: fx.Progressed) -> None:
    progress = self.progress.setdefault(process.name, [])
    progress.append(effect)
    if not process.rank:
      super().progressed(process, effect)
    # The run may have begun again since process 0 was notified.
    elif self.progress[process.names[0]][len(progress) - 1] != effect:
      self.fail("A10", f"{process.name} is told another {effect}")

  def fingerprint(self, process: Any, taken: Any) -> None:
    super().fingerprint(process, taken)
    # What its coordinator gets is one of all its processes.
    self.taken.clear()

  def check_requested_sums(self, process: Any) -> None:
    if not process.rank:
      super().check_requested_sums(process)

  def resolved(self, process: Any, outcome: fx.Resolved) -> None:
    if not process.rank:
      super().resolved(process, outcome)
      return
    theirs = self.submissions[process.names[0], outcome.sequence].outcome
    if outcome != theirs:
      self.fail("A7", f"{process.name} is told {outcome}, process 0 {theirs}")

  def counts(self, process: Any, computed: int, told: Any) -> None:
    if not process.rank:
      super().counts(process, computed, told)

  def no_deadline(self, process: Any) -> None:
    # Another process waits for process 0, and ends with it; for a gradient of its
    # own replica a training loop waits as long as it waits for anything.
    over = process.rank or process.node.core.over
    over = over or "own replica" in process.node.missing(self.world.now)
    waits = process.joined.suspended or process.pending is not None
    if waits and process.alive and not over and not process.node.over:
      self.fail("A6", f"{process.name} waits without a deadline")

  def reachable_members(self, coordinator: Any) -> list[Any]:
    since = self.world.now - FORGOTTEN
    runs = lambda p: p.alive and max(p.paused_until, p.busy_until) <= since
    result = super().reachable_members(coordinator)
    return [p for p in result if all(map(runs, self.group(p.name)))]

  def fetches(self, process: Any) -> bool:
    return any(p.fetching is not None for p in self.group(process.name))

  def died(self, process: Any) -> None:
    self.changed_at = self.world.now
    for name in process.names:
      for names in self.holders.values():
        names.discard(name)
    if not process.over:
      self.left_in_peace = ""


_KINDS = (
  ("kill", 8),
  ("pause", 4),
  ("stop", 3),
  ("break", 3),
  ("cut", 2),
  ("kill coordinator", 6),
  ("kill coordinator twice", 2),
  ("kill amid effects", 4),
  ("lose power", 1),
  ("pause coordinator", 3),
  ("snapshot", 2),
  ("leave", 1),
  ("abort", 2),
  ("save", 1),
)


def schedule(seed: int, steps: int = 8) -> faults.Schedule:
  """The schedule of a seed; its faults strike any process of a replica."""
  r = random.Random(seed)
  result = faults.schedule(seed, steps)
  replicas = min(result.setting.replicas, 3)
  setting = dataclasses.replace(
    result.setting,
    inline=False,
    replicas=replicas,
    needed=min(result.setting.needed, replicas + 1),
    leaves=False,
  )
  pace = max(setting.compute) + 6 * setting.latency
  struck, time = [], 0.0
  for _ in range(r.choice((0, 1, 1, 2, 3, 4))):
    time += r.expovariate(1.0 / (3 * pace)) + r.choice((0, 0, 0, 5.0))
    kind = r.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])[0]
    index, rank = r.randrange(replicas), r.randrange(SIZE)
    other = (r.randrange(replicas), r.randrange(SIZE))
    short = r.choice((0.01, 0.1, 1.0, SILENCE + 1.0))
    long = r.choice((SILENCE + 1.0, 3 * SILENCE_TIMEOUT))
    often = r.choice((0.0, 0.0, -1.0))
    struck.append((time, kind, (index, rank, other, short, long, often)))
  return faults.Schedule(seed, setting, tuple(struck))


def _living(world: Any, index: int, rank: int) -> Any:
  for process in reversed(world.all):
    if (process.index, process.rank) == (index, rank) and process.alive:
      return None if process.over else process
  return None


def strike(world: Any, kind: str, details: tuple[Any, ...]) -> None:
  """Lets a fault happen to one process, where there is one."""
  index, rank, other, short, long, often = details
  process = _living(world, index, rank)
  if "coordinator" in kind or kind in ("kill amid effects", "lose power"):
    args = (short,)
    if kind == "kill amid effects":
      args = (0.5, int(10 * short))
    elif kind == "lose power":
      args = (0.5, 2)
    faults.strike(world, kind, (index, *args))
    return
  if process is None:
    return
  # What is lost after a fault may be due to it.
  world.quiet_at = math.inf
  second = _living(world, *other)
  match kind:
    case "kill":
      if often < 0.0 and faults.can_spare(world, process.index):
        world.gone.add(process.index)
        world.spared = True
      world.kill(process)
    case "pause":
      world.pause(process, short)
    case "stop":
      world.pause(process, long)
    case "break":
      if second is not None:
        world.reset(process, second)
    case "cut":
      if second is not None and second is not process:
        world.cut(process, second, short)
        world.cut(second, process, short)
    case "snapshot":
      process.fail_snapshots += 1
    case "leave":
      first = world.by_name[process.names[0]]
      first.wants_leave = not world.spared
    case "save":
      first = world.by_name[process.names[0]]
      if first.alive and first.called_at < math.inf:  # A program joins first.
        world.checker.save_wanted(first)
        world.input(first, msg.Save())
        world.input(first, msg.SetHyperparams((("rate", world.now),)))
    case "abort":
      world.tell(f"{process.name} aborts")
      world.by_name[process.names[0]].aborted = True
      world.input(process, msg.Leave(True, "an exception"))
      if process.alive:
        world.close(process, "left", "it has ended")
    case _:
      raise AssertionError(kind)


def run(found: faults.Schedule, trace: bool = False) -> faults.Result:
  """Runs a schedule to its end, checking all the time."""
  return faults.run(found, trace, GroupWorld, GroupChecker, strike)


class Leased:
  """The same schedules, where samples are leased."""

  run = staticmethod(run)

  @staticmethod
  def schedule(seed: int) -> faults.Schedule:
    """The schedule of a seed."""
    return leases.with_data(schedule(seed), seed)
