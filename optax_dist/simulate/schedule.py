"""Which replica contributes to which step, on which parameters: simulated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from optax_dist.simulate.engines import event_engine
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import Timing


class Schedule(NamedTuple):
  """The order of events, without gradients.

  Attributes:
    times: time of each step, float64 `[S]`.
    members: the contributors to each step, int32 `[S, k]`.
    local_steps: the step of the parameters they used, int32 `[S, k]`.
    restarts: the replicas that took the parameters before the step without
      having contributed to the previous one: late, or back; bool `[S, N]`.
    timing: how the replicas' time was spent.
  """

  times: np.ndarray
  members: np.ndarray
  local_steps: np.ndarray
  restarts: np.ndarray
  timing: Timing


class Waves(NamedTuple):
  """Exchanges in groups without a repeated replica, so that each is parallel.

  Attributes:
    times: time of the last exchange in each group, float64 `[W]`.
    exchanges: number of exchanges up to its end, int64 `[W]`.
    order: all replicas, those with an exchange first, in the order of their
      exchanges; int32 `[W, N]`.
    on: which entries of that order have an exchange, bool `[W, N]`.
    restarts: which took the center before the wave, bool `[W, N]`.
  """

  times: np.ndarray
  exchanges: np.ndarray
  order: np.ndarray
  on: np.ndarray
  restarts: np.ndarray


class _Recorder:
  """Records what the engine writes to a journal."""

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
  """Simulates the timing, and records the order of events.

  Args:
    strategy: what the replicas do.
    draws: the computation times.
    replicas: number of replicas, at least as many as are aggregated.
    seconds: virtual time to simulate.
    steps: number of steps, if that comes first.
    communication: seconds from a commit until its parameters are available.
    failures: when replicas fail and come back.
    seed: seed of the failures.

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
  """Groups consecutive exchanges, with each replica at most once per group.

  A replica's computation between two exchanges does not depend on others. A
  restart begins a new group, because it reads the center at that moment.
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
  """The largest power of two that is at most `value`, but at least 1.

  Example:
    >>> [power_of_two_below(x) for x in (0.3, 1, 7, 8)]
    [1, 1, 4, 8]
  """
  return 2 ** max(0, math.floor(math.log2(max(value, 1))))
