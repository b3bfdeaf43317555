"""Learners that never wait, and merge fragments; the faults are those of `faults`.

A step of the log is a round of a fragment: it has a grace window, and weights by
what is in each contribution. Training loops go on while one is under way, while
their replica is no member, and while nobody leads.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

from optax_dist.coordinator.extras.decoupled_diloco import rules
from optax_dist.coordinator.extras.decoupled_diloco.rounds import (
  WORK,
  MakeRounds,
  Work,
)
from optax_dist.coordinator.protocol.entries import Committed, Fragments
from tests.simulation import faults
from tests.simulation.invariants import Checker
from tests.simulation.world import Process, World

# Own steps between two contributions, where nobody calls.
_TURN = 2
# How often one gives before its turn, as those that are slow do.
_EARLY = 0.1
# Of a seed divided by 16: runs that fail amid a round.
_DAMAGED = 5


class LearnerWorld(World):
  """A world whose training loops wait for nothing."""

  def __init__(self, *args: Any, **keywords: Any):
    # Of each process: its own steps, and those when it last gave something.
    self.steps: collections.Counter[str] = collections.Counter()
    self.given: collections.Counter[str] = collections.Counter()
    super().__init__(*args, **keywords)

  def next_gradient(self, process: Process) -> None:
    asked = process.leaves_since <= self.now or process.wants_finish
    if process.alive and not (process.over or process.busy or asked):
      self.begin_unless_done(process)

  def take_step(self, process: Process, seen: Process, mishap: str) -> None:
    submission, name = process.submission, process.name
    self.steps[name] += 1
    if submission.pending >= 0 and seen.answer(submission.pending) is not None:
      submission.on_answer()
    if seen.joined.incarnation != submission.incarnation:
      submission.finish("lost")
    if submission.pending < 0:
      submission.resume(seen.joined.incarnation, seen.published)
    called = process.called == process.step
    turn = called or self.steps[name] >= self.given[name] + _TURN
    gives = turn or self.random.random() < _EARLY
    if gives and submission.pending < 0 and not seen.joined.suspended:
      self.give_fragment(process, turn)

  def give_fragment(self, process: Process, begins: bool) -> None:
    """Submits a contribution to the round that is open, as far as it knows."""
    name = process.name
    steps = self.steps[name] - self.given[name]
    self.given[name] = self.steps[name]
    seconds = self.setting.compute[process.index]
    tokens = 8 * steps * self.random.randrange(3)
    process.computed += 1
    self.give_gradient(process, process)
    late = self.random.randrange(2)
    work = Work(tokens, steps, seconds, late, begins)
    self.submit(process, WORK.encode(work))


class FragmentsChecker(Checker):
  """Checks also what the contributions to a round count for."""

  def committed(self, process: Any, commit: Committed) -> None:
    super().committed(process, commit)
    work = []
    for part in commit.parts:
      name = self.processes[part.incarnation]
      submitted = self.submissions[name, part.sequence].submitted
      work.append(WORK.decode(submitted.work))
    shares = rules.shares((w.tokens, w.steps, w.late) for w in work)
    weights = [part.weight for part in commit.parts]
    if weights != [share * len(shares) for share in shares]:
      self.fail("A11", f"step {commit.round.step} weighs {weights}: {work}")


def schedule(seed: int, steps: int = 12) -> faults.Schedule:
  """The schedule of a seed."""
  r = random.Random(f"fragments of {seed}")
  result = faults.schedule(seed, steps)
  setting = result.setting
  needed = min(setting.needed, setting.replicas)
  numbers = Fragments(
    fragments=2,
    period=2 * _TURN,
    overlap=r.choice((0, 1, 4)),
    safety=r.choice((0.5, 1.0)),
  )
  setting = dataclasses.replace(
    setting,
    needed=needed,
    alone=False,
    max_staleness=0,
    starts=(),
    policy=MakeRounds(numbers),
  )
  result = dataclasses.replace(result, setting=setting)
  return _damaged(result, r) if seed % 16 == _DAMAGED else result


def _damaged(found: faults.Schedule, r: random.Random) -> faults.Schedule:
  """The run fails while a round's window is open for a slow learner."""
  setting = found.setting
  needed = setting.replicas - 1
  slow = r.randrange(setting.replicas)
  times = (2.0 if index == slow else 0.1 for index in range(8))
  numbers = Fragments(fragments=2, period=2 * _TURN, overlap=4, safety=1.0)
  setting = dataclasses.replace(
    setting,
    needed=needed,
    policy=MakeRounds(numbers),
    fingerprint_every=1,
    same_start=True,
    steps=24,
    compute=tuple(times),
    latency=0.0005,
  )
  struck = ((r.uniform(1.5, 6.0), "damage", (r.randrange(2),)),)
  return dataclasses.replace(found, setting=setting, faults=struck)


def run(found: faults.Schedule, trace: bool = False) -> faults.Result:
  """Runs a schedule to its end, checking all the time."""
  return faults.run(found, trace, LearnerWorld, FragmentsChecker)
