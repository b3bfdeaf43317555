"""Learners of decoupled DiLoCo in virtual time and one process.

What they compute is real and how long it takes is said, so that a run is the same
each time. The strategy and the rules are the coordinator's; rounds follow it,
without its log: one is open at a time, the first contribution calls the others, a
quorum opens the window.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optax_dist.coordinator.extras.decoupled_diloco import rules
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)


@dataclasses.dataclass
class Learner:
  """One of them.

  Attributes:
    local: its state.
    steps: how many it has made.
    pending: the round that it has given to and not heard of.
    merged: whether that was merged; None: not known yet.
    called: the latest round that it was called for.
  """

  local: Any
  steps: int = 0
  pending: int | None = None
  merged: bool | None = None
  called: int = -1


@dataclasses.dataclass(frozen=True)
class Merge:
  """A round that was merged.

  Attributes:
    at: when.
    members: whose contributions are in.
    late: by how many rounds of the fragment each of them was.
  """

  at: float
  members: tuple[int, ...]
  late: tuple[int, ...]


class VirtualLearners:
  """Learners in virtual time.

  Attributes:
    learners: by number; None: lost.
    shared: what all share, by round.
    merges: rounds so far.
    now: the time.
  """

  def __init__(
    self,
    strategy: decoupled_diloco.DecoupledDiloco,
    params: Any,
    gradient: Callable[[int, Any], Any],
    step_seconds: Sequence[float],
    *,
    tokens: int = 1,
    latency: float = 0.001,
    merge_seconds: float = 0.005,
    jitter: float = 0.1,
    seed: int = 0,
  ):
    """Makes a run at its start.

    Args:
      strategy: of all of them.
      params: that they begin from.
      gradient: of a learner, at its parameters.
      step_seconds: how long a step of each one takes.
      tokens: in a step.
      latency: seconds for a message.
      merge_seconds: for a merge.
      jitter: the spread of steps, as a part of them.
      seed: of that and of where in a step each learner begins.
    """
    self.strategy, self._gradient = strategy, gradient
    self._seconds, self._tokens = step_seconds, tokens
    self._latency, self._merge_seconds = latency, merge_seconds
    self._jitter, self._random = jitter, np.random.default_rng(seed)
    self.shared = [strategy.shared(params)]
    self.merges: list[Merge] = []
    self.now, self._published = 0.0, 0
    self._inside: dict[int, Any] = {}
    self._began: float | None = None
    self._closes = math.inf
    self._events: list[Any] = []
    self._numbers = itertools.count()
    self.learners: list[Learner | None] = [None] * len(step_seconds)
    for number in range(len(step_seconds)):
      self.join(number)

  @property
  def center(self) -> Any:
    """The parameters that all share."""
    return self.shared[-1].params

  def join(self, number: int) -> None:
    """A learner begins from what all share, and another's own optimizer."""
    local = self.strategy.local(self.shared[self._published])
    live = [x for x in self.learners if x is not None]
    if live:
      local = local._replace(opt_state=live[0].local.opt_state)
    self.learners[number] = learner = Learner(local)
    first = self._random.uniform(0, self._seconds[number])
    self._at(first, self._step, number, learner)

  def lose(self, number: int) -> None:
    """A learner is gone, with what it has given to the round that is open."""
    self.learners[number] = None
    self._inside.pop(number, None)
    self._look()

  def run(self, until: float) -> None:
    """Advances to this time."""
    while self._events and self._events[0][0] <= until:
      self.now, _, action, args = heapq.heappop(self._events)
      action(*args)
    self.now = until

  def _at(self, delay: float, action: Callable[..., None], *args: Any) -> None:
    event = (self.now + delay, next(self._numbers), action, args)
    heapq.heappush(self._events, event)

  def _step(self, number: int, learner: Learner) -> None:
    if self.learners[number] is not learner:
      return
    strategy = self.strategy
    gradient = self._gradient(number, learner.local.params)
    learner.local = strategy.train(learner.local, gradient, self._tokens)
    learner.steps += 1
    merged = bool(learner.merged)
    if learner.merged is not None:
      learner.pending = learner.merged = None
    if learner.pending is None:
      shared = self.shared[self._published]
      if self._published > learner.local.round:
        learner.local = strategy.merge(shared, learner.local, merged)
      open_ = learner.local.round
      called = learner.called == open_
      if strategy.is_due(learner.local, called):
        *inputs, learner.local = strategy.contribute(
          shared, learner.local, called
        )
        learner.pending = open_
        self._at(self._latency, self._arrive, number, learner, open_, *inputs)
    spread = 1 + self._jitter * self._random.standard_normal()
    seconds = self._seconds[number] * max(0.1, spread)
    self._at(seconds, self._step, number, learner)

  def _arrive(
    self, number: int, learner: Learner, round_: int, payload: Any, work: Any
  ) -> None:
    if self.learners[number] is not learner:
      return
    if round_ != len(self.merges):
      learner.merged = False
      return
    self._inside[number] = payload, work
    if self._began is None and work.begins:
      self._began = self.now
      self._at(self._latency, self._call, round_)
    self._look()

  def _call(self, round_: int) -> None:
    for learner in self.learners:
      if learner is not None:
        learner.called = round_

  def _look(self) -> None:
    """Merges what is in, if it is time; the coordinator's `Rounds` in short."""
    live = [i for i, learner in enumerate(self.learners) if learner is not None]
    begun = self._began is not None or len(self._inside) == len(live)
    needed = self.strategy.quorum.replicas_to_aggregate
    if not begun or len(self._inside) < needed:
      self._closes = math.inf
      return
    if self._closes == math.inf:
      window = rules.grace_window(
        self.strategy.fragments,
        [self._seconds[i] for i in live],
        0.0 if self._began is None else self.now - self._began,
        self._merge_seconds,
      )
      self._closes = self.now + window
      self._at(window, self._look)
    if self.now >= self._closes or len(self._inside) == len(live):
      self._merge()

  def _merge(self) -> None:
    members = tuple(sorted(self._inside))
    inputs = [self._inside[i] for i in members]
    shares = rules.shares((w.tokens, w.steps, w.late) for _, w in inputs)
    mean = tuple(
      sum(s * x for s, x in zip(shares, rows, strict=True))
      for rows in zip(*(payload for payload, _ in inputs), strict=True)
    )
    whole = self.strategy.exchanged(self.center)
    mean = tuple(
      np.pad(x, (0, like.shape[0] - len(x)))
      for x, like in zip(mean, whole, strict=True)
    )
    self.shared.append(self.strategy.apply(self.shared[-1], mean))
    late = tuple(work.late for _, work in inputs)
    self.merges.append(Merge(self.now, members, late))
    theirs = [(i, self.learners[i]) for i in members]
    delay = self._merge_seconds + self._latency
    self._at(delay, self._publish, len(self.merges), theirs)
    self._inside, self._began, self._closes = {}, None, math.inf

  def _publish(self, round_: int, members: list[tuple[int, Any]]) -> None:
    self._published = round_
    for number, learner in members:
      if self.learners[number] is learner:
        learner.merged = True
