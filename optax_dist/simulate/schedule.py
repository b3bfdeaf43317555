"""Who contributes to which step, and on which parameters: from a simulation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from optax_dist.simulate.engines import event_engine
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import Timing


class Schedule(NamedTuple):
  """The order of what happens, without its numbers.

  Attributes:
    times: of each step, float64 `[S]`.
    members: whose contributions make the step, int32 `[S, k]`.
    local_steps: of whose parameters they are, int32 `[S, k]`.
    restarts: who took the parameters before the step without having
      contributed to the one before: late, or back; bool `[S, N]`.
    timing: what became of the replicas' time.
  """

  times: np.ndarray
  members: np.ndarray
  local_steps: np.ndarray
  restarts: np.ndarray
  timing: Timing


class Waves(NamedTuple):
  """Exchanges in groups in which nobody has two: each can compute at once.

  Attributes:
    times: of the last exchange in each, float64 `[W]`.
    exchanges: up to its end, int64 `[W]`.
    order: all replicas, those with an exchange first, in the order of their
      exchanges; int32 `[W, N]`.
    on: which places in that order have an exchange, bool `[W, N]`.
    restarts: who took the center before the wave, bool `[W, N]`.
  """

  times: np.ndarray
  exchanges: np.ndarray
  order: np.ndarray
  on: np.ndarray
  restarts: np.ndarray


class _Recorder:
  """Takes what the engine would write to a journal."""

  def __init__(self) -> None:
    self.events: list[tuple[str, int]] = []
    self.commits: list[dict[str, Any]] = []

  def write(self, kind: str, /, **fields: Any) -> None:
    if kind == "commit":
      self.events.append(("commit", len(self.commits)))
      self.commits.append(fields)
    elif kind == "join" or (kind == "drop" and fields["reason"] != "lost"):
      self.events.append((kind, fields["replica"]))


def make(
  strategy: Strategy,
  draws: Draws,
  replicas: int,
  *,
  seconds: float,
  steps: int,
  communication: float = 0.0,
  failures: event_engine.Failures | None = None,
  seed: int = 0,
) -> Schedule:
  """Simulates the timing, and keeps the order of what happens.

  Args:
    strategy: what the replicas do.
    draws: how long each computation takes.
    replicas: how many there are, as many as are aggregated at least.
    seconds: when to end.
    steps: when to end, if it comes first.
    communication: seconds from a commit until its parameters are there.
    failures: when replicas go and come back.
    seed: of the failures.

  Returns:
    The schedule, of at least one step.
  """
  recorder = _Recorder()
  timing = event_engine.run(
    strategy,
    draws,
    replicas,
    steps,
    seconds=seconds,
    communication=communication,
    failures=failures,
    seed=seed,
    journal=recorder,
  )
  commits = recorder.commits
  restarts = np.zeros((len(commits) + 1, replicas), bool)
  step = 0
  for kind, number in recorder.events:
    if kind == "commit":
      step += 1
    else:
      restarts[step, number] = True
  of = lambda name: np.array(
    [[member[name] for member in c["members"]] for c in commits], np.int32
  )
  return Schedule(
    timing.commit_times,
    of("replica"),
    of("local_step"),
    restarts[: len(commits)],
    timing,
  )


def waves(schedule: Schedule) -> Waves:
  """Groups exchanges that follow each other, each replica once at most.

  What a replica computes between two exchanges depends on nobody else. Who
  restarts begins a new group, for it takes the center of that moment.
  """
  n = schedule.restarts.shape[1]
  groups: list[list[int]] = []
  restarts: list[np.ndarray] = []
  for restarted, (member,) in zip(
    schedule.restarts, schedule.members.tolist(), strict=True
  ):
    if not groups or restarted.any() or member in groups[-1]:
      groups.append([])
      restarts.append(restarted)
    groups[-1].append(member)
  everyone = range(n)
  ends = np.cumsum([len(group) for group in groups])
  return Waves(
    schedule.times[ends - 1],
    ends,
    np.array(
      [[*g, *(r for r in everyone if r not in set(g))] for g in groups],
      np.int32,
    ),
    np.array([[i < len(g) for i in everyone] for g in groups]),
    np.array(restarts),
  )


def power_of_two_below(value: float) -> int:
  """The largest power of two that is at most `value`, and 1 at least.

  Example:
    >>> [power_of_two_below(x) for x in (0.3, 1, 7, 8)]
    [1, 1, 4, 8]
  """
  return 2 ** max(0, math.floor(math.log2(max(value, 1))))
