"""Chooses a strategy and its parameters for a fleet, and explains why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from optax_dist.coordinator.metrics import goodput
from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale.backup_groups import backup_groups
from optax_dist.simulate.scale.decoupled_diloco import decoupled_diloco
from optax_dist.simulate.scale.diloco import diloco
from optax_dist.simulate.scale.elastic_restart import elastic_restart
from optax_dist.simulate.scale.fleet import Fleet
from optax_dist.simulate.scale.one_program import (
  best_checkpoint_interval,
  one_program,
)
from optax_dist.simulate.scale.replica_groups import replica_groups
from optax_dist.simulate.scale.run import Strategy, simulate_fleet

_FAILURES = 300
_BACKUP_SHARES = (0.01, 0.03, 0.1)


class Option(NamedTuple):
  """A way to train on the fleet.

  Attributes:
    name: name of the strategy.
    chips_per_group: number of chips that compute one gradient together.
    replicas_to_aggregate: groups in a step; None for all that are up.
    period: local steps between exchanges; None if every step is exchanged.
    checkpoint_interval: seconds of work between checkpoints; None if returning
      groups get their state from the others.
    outcome: how the chips' time is spent.
    progress: useful chip-seconds per chip-second, weighted for local steps.
    low, high: the range over the repetitions.
  """

  name: str
  chips_per_group: int
  replicas_to_aggregate: int | None
  period: int | None
  checkpoint_interval: float | None
  outcome: Goodput
  progress: float
  low: float
  high: float

  def report(self) -> dict[str, Any]:
    """Everything as plain numbers, for JSON."""
    return self._asdict() | {"outcome": self.outcome.report()}


class Choice(NamedTuple):
  """A recommendation.

  Attributes:
    options: all simulated options, the best first.
    recommended: the best one.
    runner_up: the best one of another strategy; None if there is none.
    reason: how they differ, in words.
  """

  options: tuple[Option, ...]
  recommended: Option
  runner_up: Option | None
  reason: str


def choose(
  fleet: Fleet,
  *,
  group_sizes: Sequence[int] = (),
  periods: Sequence[int] = (10, 50, 200),
  local_step_value: float = 1.0,
  repetitions: int = 3,
  seconds: float | None = None,
  seed: int = 0,
  progress: Callable[[float], None] = lambda share: None,
) -> Choice:
  """Recommends a strategy for a fleet.

  Args:
    fleet: the fleet to train on.
    group_sizes: candidates for the chips in a group; by default the fleet's
      own. A step is assumed to take equally long in each: work per chip is the
      same.
    periods: candidates for DiLoCo's period.
    local_step_value: the value of a local step, relative to a step whose
      gradient is exchanged.
    repetitions: number of simulations of each option.
    seconds: virtual time of each; None for about 300 failures.
    seed: equal seeds give equal choices.
    progress: called with the fraction that is done.

  Returns:
    The choice.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> from optax_dist import simulate
    >>> fleet = Fleet(1024, 8, simulate.parse_latency("constant:1"),
    ...   failure_rate=1e-6, repair=600.0, restart=60.0, save=10.0)
    >>> choose(fleet, repetitions=1).recommended.checkpoint_interval is None
    True
  """
  if not local_step_value > 0:
    raise ValueError(
      f"local_step_value must be above 0, got {local_step_value!r}."
    )
  if repetitions < 1:
    raise ValueError(f"repetitions must be at least 1, got {repetitions!r}.")
  between = fleet.mean_time_between_failures
  if seconds is None and between < math.inf:
    seconds = max(_FAILURES * between, 20 * (between + fleet.repair))
  tried = [
    (made, entry)
    for size in group_sizes or (fleet.chips_per_group,)
    for made in [dataclasses.replace(fleet, chips_per_group=size)]
    for entry in _entries(made, periods)
  ]
  options = []
  for i, (made, (strategy, k, period, interval)) in enumerate(tried):
    outcomes = [
      simulate_fleet(strategy, made, seconds=seconds, seed=seed + j)
      for j in range(repetitions)
    ]
    worth = 1.0 if period is None else local_step_value
    values = [worth * outcome.goodput for outcome in outcomes]
    total = goodput.make(
      {
        name: sum(outcome.seconds[name] for outcome in outcomes)
        for name in goodput.CATEGORIES
      }
    )
    options.append(
      Option(
        strategy.name,
        made.chips_per_group,
        k,
        period,
        interval,
        total,
        sum(values) / repetitions,
        min(values),
        max(values),
      )
    )
    progress((i + 1) / len(tried))
  options.sort(key=lambda option: -option.progress)
  best = options[0]
  others = [o for o in options if _kind(o) != _kind(best)]
  second = others[0] if others else None
  return Choice(tuple(options), best, second, _reason(best, second))


def _entries(
  fleet: Fleet, periods: Sequence[int]
) -> list[tuple[Strategy, int | None, int | None, float | None]]:
  """Strategies with their k, period and checkpoint interval."""
  interval = best_checkpoint_interval(
    fleet.save, fleet.mean_time_between_failures
  )
  # If saving or failing costs nothing, no interval is worth naming.
  best = interval if fleet.save and math.isfinite(interval) else None
  found: list[tuple[Strategy, int | None, int | None, float | None]] = [
    (one_program(best), None, None, interval),
    (elastic_restart(best), None, None, interval),
    (replica_groups(), None, None, None),
  ]
  n = fleet.groups
  for k in sorted({n - max(1, round(n * share)) for share in _BACKUP_SHARES}):
    if k >= 1:
      found.append((backup_groups(k), k, None, None))
  for period in periods:
    found.append((diloco(period), None, period, None))
    found.append((decoupled_diloco(period), None, period, None))
  return found


def _kind(option: Option) -> str:
  return option.name.partition(",")[0]


def _reason(best: Option, second: Option | None) -> str:
  if second is None:
    return "nothing else was simulated"
  costs = {
    name: second.outcome.share(name) - best.outcome.share(name)
    for name in goodput.CATEGORIES
    if name != "useful"
  }
  name, most = max(costs.items(), key=lambda cost: cost[1])
  overlap = second.high >= best.low
  sure = "; the two are too close to tell apart" if overlap else ""
  if most <= 0:
    return f"it is worth more, though not by where the time goes{sure}"
  return (
    f"it spends {100 * most:.1f} points less on {name}"
    f" ({goodput.CATEGORIES[name]}) than {second.name}{sure}"
  )
