"""Trains a real model in virtual time, with realistic staleness.

The timing determines who contributes to which step, and how late; this
library's transforms aggregate. All replicas are batched with `vmap` on one
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from optax_dist.simulate import schedule as schedules
from optax_dist.simulate import training_programs as programs
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.engines.event_engine import Failures
from optax_dist.simulate.latency.distributions import Latency
from optax_dist.simulate.strategy import UNBOUNDED, Strategy
from optax_dist.simulate.timing import Timing
from optax_dist.states.center import center_params

# One jitted function for each function, cached between calls.
_jitted = functools.lru_cache(jax.jit)
_MEAN = optax.sgd(1.0)
_MOST_STEPS = 10_000_000

Gradient = Callable[[Any, jax.Array], Any]
Evaluate = Callable[[Any], dict[str, jax.Array]]


class Training(NamedTuple):
  """A training in virtual time.

  Attributes:
    strategy: how the replicas trained together.
    times: seconds of virtual time at each evaluation, float64 `[E]`.
    steps: steps taken by then (for elastic averaging: exchanges), int64 `[E]`.
    metrics: the evaluated metrics: float64 `[E]` each.
    params: the final parameters: the common ones, or the center.
    timing: how the replicas' time was spent.
  """

  strategy: Strategy
  times: np.ndarray
  steps: np.ndarray
  metrics: dict[str, np.ndarray]
  params: Any
  timing: Timing

  def time_to(self, metric: str, value: float) -> float:
    """Seconds until a metric first reaches a value, or infinity.

    Between evaluations the metric is interpolated linearly.

    Args:
      metric: a key of `metrics`.
      value: the value to reach, from either side.

    Returns:
      Seconds of virtual time.
    """
    series = self.metrics[metric]
    sign = 1 if series[0] <= value else -1
    reached = np.flatnonzero(sign * series >= sign * value)
    if not reached.size:
      return float("inf")
    i = int(reached[0])
    if i == 0:
      return float(self.times[0])
    part = (value - series[i - 1]) / (series[i] - series[i - 1])
    return float(self.times[i - 1] + part * (self.times[i] - self.times[i - 1]))


def simulate_training(
  strategy: Strategy,
  latency: Latency,
  replicas: int,
  *,
  params: Any,
  gradient: Gradient,
  optimizer: optax.GradientTransformation,
  evaluate: Evaluate,
  seconds: float,
  evaluations: int = 20,
  seed: int = 0,
  communication: float = 0.0,
  failures: Failures | None = None,
  staleness_weight: Literal["inverse"] | Callable[[Any], Any] | None = None,
  moving_rate: float | None = None,
  outer: optax.GradientTransformation | None = None,
  progress: Callable[[float], None] = lambda share: None,
) -> Training:
  """Trains a model for some virtual time.

  Calls with the same functions, optimizer and numbers but another seed run the
  same compiled program.

  Args:
    strategy: how the replicas train together. Elastic averaging exchanges with
      the center one replica at a time, each on its own clock.
    latency: how long a gradient takes on each host.
    replicas: number of replicas.
    params: the initial parameters, a pytree of arrays.
    gradient: computes a gradient from parameters and a key (which selects the
      batch), with the structure of the parameters.
    optimizer: applied to the mean gradient; or, if replicas have their own
      parameters, to each replica's gradients.
    evaluate: computes scalars by name from parameters.
    seconds: virtual time; it ends with the last whole group of steps that fits,
      but at least one.
    evaluations: approximate number of evaluations.
    seed: seed of latencies and batches.
    communication: seconds from a commit until its parameters are available.
    failures: when replicas fail and come back; None for never.
    staleness_weight: see `optax_dist.sync_replicas`.
    moving_rate: for elastic averaging; None for 0.9 / replicas.
    outer: the outer optimizer of local updates; None for the mean of the
      replicas.
    progress: called with the fraction that is done.

  Returns:
    The training results.

  Raises:
    ValueError: a number is out of range; a step would have more contributions
      than there are replicas; or local updates would not wait for all.
  """
  for name, value in (("seconds", seconds), ("evaluations", evaluations)):
    if not 0 < value < float("inf"):
      raise ValueError(f"{name} must be above 0, got {value!r}.")
  k = strategy.replicas_to_aggregate
  if k > replicas:
    raise ValueError(
      f"a training of {replicas} replicas cannot aggregate {k} contributions:"
      " lower replicas_to_aggregate."
    )
  if strategy.kind == "change" and (k < replicas or failures is not None):
    raise ValueError(
      "local updates wait for all replicas in a training: backups and failures"
      " must be none."
    )
  schedule = schedules.make(
    strategy,
    Draws(latency, replicas, seed=seed, local_steps=strategy.local_steps),
    replicas,
    seconds=seconds,
    steps=_MOST_STEPS,
    communication=communication,
    failures=failures,
    seed=seed,
  )
  key = jax.random.key(seed)
  run: Callable[..., Any]
  match strategy.kind:
    case "gradient":
      late = strategy.max_staleness
      tx = programs.sync_replicas_of(
        optimizer,
        k,
        replicas,
        None if late == UNBOUNDED else late,
        staleness_weight,
      )
      carry = programs.start_gradients(tx, params, replicas)
      inputs: tuple[np.ndarray, ...] = (
        np.arange(len(schedule.times), dtype=np.int32),
        schedule.members,
        schedule.local_steps,
        schedule.restarts,
      )
      run = functools.partial(programs.run_gradients, tx, gradient)
      times, steps = schedule.times, np.arange(1, len(schedule.times) + 1)
      result = lambda carry: carry[0]
    case "exchange":
      waves = schedules.waves(schedule)
      rate = 0.9 / replicas if moving_rate is None else moving_rate
      carry = programs.start_exchanges(optimizer, params, replicas)
      inputs = (
        np.arange(len(waves.times), dtype=np.int32),
        waves.order,
        waves.on,
        waves.restarts,
      )
      run = functools.partial(
        programs.run_exchanges, optimizer, gradient, strategy.local_steps, rate
      )
      times, steps = waves.times, waves.exchanges
      result = lambda carry: carry[0]
    case "change":
      tx = programs.local_updates_of(
        optimizer, outer or _MEAN, strategy.local_steps, replicas
      )
      carry = programs.start_changes(tx, params, replicas)
      inputs = (np.arange(len(schedule.times), dtype=np.int32),)
      run = functools.partial(
        programs.run_changes, tx, gradient, strategy.local_steps
      )
      times, steps = schedule.times, np.arange(1, len(schedule.times) + 1)
      result = lambda carry: center_params(carry[1])
  # Chunks of equal length share one program; a power of two is the same for
  # most seeds.
  size = min(schedules.power_of_two_below(len(times) / evaluations), len(times))
  evaluate = _jitted(evaluate)
  rows = [evaluate(params)]
  at = [0]
  for part in _chunks(inputs, size):
    carry = run(key, carry, part)
    at.append(at[-1] + size)
    rows.append(evaluate(result(carry)))
    progress(at[-1] / len(times))
  ends = np.array(at[1:]) - 1
  return Training(
    strategy,
    np.concatenate([[0.0], times[ends]]),
    np.concatenate([[0], steps[ends]]),
    {name: np.array([float(row[name]) for row in rows]) for name in rows[0]},
    result(carry),
    schedule.timing,
  )


def _chunks(
  inputs: tuple[np.ndarray, ...], size: int
) -> Iterator[tuple[np.ndarray, ...]]:
  for i in range(0, len(inputs[0]) - size + 1, size):
    yield tuple(x[i : i + size] for x in inputs)
