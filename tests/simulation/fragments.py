"""Learners that never wait, and merge fragments; the faults are those of `faults`.

A step of the log is a round of a fragment: it has a grace window, and weights by
what is in each contribution. Training loops go on while one is under way, while
their replica is no member, and while nobody leads.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import struct
from typing import Any

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import Committed, Work
from optax_dist.decoupled_diloco import rules
from tests.simulation import faults
from tests.simulation.invariants import Checker
from tests.simulation.world import Process, World, digest

# Own steps between two contributions, where nobody calls.
_TURN = 2
# How often one gives before its turn, as those that are slow do.
_EARLY = 0.1


class LearnerWorld(World):
  """A world whose training loops wait for nothing."""

  def __init__(self, *args: Any, **keywords: Any):
    # Of each process: its own steps, and those when it last gave something.
    self.steps: collections.Counter[str] = collections.Counter()
    self.given: collections.Counter[str] = collections.Counter()
    super().__init__(*args, **keywords)

  def next_gradient(self, process: Process) -> None:
    asked = process.leaves_since <= self.now or process.wants_finish
    if not process.alive or process.over or process.busy or asked:
      return
    done = process.step >= self.setting.steps
    if process.wants_leave or (done and self.setting.leaves):
      process.leaves_since = self.now
      self.input(process, ins.LeaveWanted())
    elif done:
      process.wants_finish = True
      self.input(process, ins.FinishWanted("enough"))
    else:
      self.compute(process, 1, None)

  def computed(self, process: Process, *args: Any) -> None:
    if not process.alive or process.over:
      return
    if process.paused_until > self.now:
      process.backlog.append((self.computed, (process, *args)))
      return
    process.busy = False
    name = process.name
    self.steps[name] += 1
    called = process.called == process.step
    turn = called or self.steps[name] >= self.given[name] + _TURN
    gives = turn or self.random.random() < _EARLY
    # The core still has an answer to take where `pending` is among its inputs.
    if gives and process.pending is None and not process.suspended:
      self.give_fragment(process, turn)
    self.next_gradient(process)

  def give_fragment(self, process: Process, begins: bool) -> None:
    """Submits a contribution to the round that is open, as far as it knows."""
    name = process.name
    steps = self.steps[name] - self.given[name]
    self.given[name] = self.steps[name]
    process.sequence += 1
    gradient = digest(process.uid, process.sequence)
    process.gradients[process.sequence] = gradient
    finite = self.random.random() > 0.01
    payload = b""
    if self.setting.inline and finite:
      payload = struct.pack("<q", gradient)
    seconds = self.setting.compute[process.index]
    tokens = 8 * steps * self.random.randrange(3)
    submitted = ins.Submitted(
      process.sequence,
      -1,
      process.admission,
      process.step,
      1,
      finite,
      payload,
      gradient,
      work=Work(tokens, steps, seconds, self.random.randrange(2), begins),
    )
    process.pending, process.pending_since = submitted, self.now
    if self.checker is not None:
      self.checker.submitted(process, submitted)
    self.input(process, submitted)

  def on_resolved(self, process: Process, effect: fx.Resolved) -> None:
    super().on_resolved(process, effect)
    process.stale = None  # It trains on as it is.


class FragmentsChecker(Checker):
  """Checks also what the contributions to a round count for."""

  def committed(self, process: Any, commit: Committed) -> None:
    super().committed(process, commit)
    work = []
    for part in commit.parts:
      name = self.processes[part.incarnation]
      work.append(self.submissions[name, part.sequence].submitted.work)
    shares = rules.shares((w.tokens, w.steps, w.late) for w in work)
    weights = [part.weight for part in commit.parts]
    if weights != [share * len(shares) for share in shares]:
      self.fail("A11", f"step {commit.attempt.step} weighs {weights}: {work}")


def schedule(seed: int, steps: int = 12) -> faults.Schedule:
  """The schedule of a seed."""
  r = random.Random(f"fragments of {seed}")
  found = faults.schedule(seed, steps)
  setting = found.setting
  needed = min(setting.needed, setting.replicas)
  numbers = rules.Config(
    fragments=2,
    period=2 * _TURN,
    quorum=needed,
    overlap=r.choice((0, 1, 4)),
    safety=r.choice((0.5, 1.0)),
  )
  setting = dataclasses.replace(
    setting, needed=needed, alone=False, max_staleness=0, fragments=numbers
  )
  return dataclasses.replace(found, setting=setting)


def run(found: faults.Schedule, trace: bool = False) -> faults.Result:
  """Runs a schedule to its end, checking all the time."""
  return faults.run(found, trace, LearnerWorld, FragmentsChecker)
