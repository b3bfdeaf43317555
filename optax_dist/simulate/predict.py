"""Predictions from a journal, with their uncertainty."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from optax_dist.simulate.engine import NoStepError, simulate_timing
from optax_dist.simulate.recorded import Recorded
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import INTERVAL, LEVEL

_MOST_STEPS = 500
# Relative accuracy to aim for.
_GOAL = 0.1


class Prediction(NamedTuple):
  """A predicted pace in steps per second.

  Attributes:
    steps_per_second: the mean over the repetitions.
    low, high: the interval of 95 % of the repetitions. Each draws its times
      from the recorded ones in stretches (a moving block bootstrap), and is as
      long as the predicted run.
    doubts: why it may still be wrong, one line each.
  """

  steps_per_second: float
  low: float
  high: float
  doubts: tuple[str, ...]

  def __str__(self) -> str:
    return (
      f"{self.steps_per_second:.4g} steps/s"
      f" ({LEVEL} %: {self.low:.4g} to {self.high:.4g})"
    )


def predict(
  recorded: Recorded,
  strategy: Strategy | None = None,
  replicas: int | None = None,
  *,
  communication: float | None = None,
  repetitions: int = 20,
) -> Prediction:
  """Predicts the pace of replicas like the recorded ones.

  Args:
    recorded: a run from `from_journal`. Its rate of failures is as uncertain as
      its number of `losses` makes it; without any, it is taken to be exact.
    strategy: the strategy to predict; None for the recorded one.
    replicas: number of replicas; None for the recorded number.
    communication: seconds from the last gradient of a step until its members
      continue to compute; None for the recorded time.
    repetitions: number of simulations, each as long as the recorded run, but of
      at most 500 steps.

  Returns:
    The prediction.

  Raises:
    ValueError: a number is out of range, or without failures no step is ever
      taken.
  """
  if repetitions < 2:
    raise ValueError(f"repetitions must be at least 2, got {repetitions}.")
  strategy = recorded.strategy if strategy is None else strategy
  n = recorded.replicas if replicas is None else replicas
  steps = min(max(recorded.steps, 10), _MOST_STEPS)
  if communication is None:
    communication = recorded.communication
  paces, stopped = [], 0
  seeds = np.random.SeedSequence(0).spawn(repetitions)
  for i, source in enumerate(seeds):
    rng = np.random.default_rng(source)
    failures = recorded.failures
    if failures is not None:
      # Resamples the failures observed in the same time.
      rate, count = failures.rate, len(recorded.losses)
      if count:
        rate *= rng.gamma(count) / count
      pick = lambda values: tuple(rng.choice(values, len(values)))  # noqa: B023
      failures = failures._replace(
        rate=rate,
        downtimes=pick(failures.downtimes),
        unnoticed=pick(failures.unnoticed) if failures.unnoticed else (),
      )
    try:
      timing = simulate_timing(
        strategy,
        recorded.latency.resampled(rng),
        n,
        steps=steps + 1,
        seed=i,
        communication=communication,
        failures=failures,
      )
    except NoStepError:
      if failures is None:
        raise
      paces.append(0.0)  # All were lost at once.
      stopped += 1
      continue
    stopped += timing.stopped
    times = timing.commit_times
    # From the first step on, as for a journal.
    taken = times[-1] - times[0]
    paces.append((times.size - 1) / taken if taken > 0 else 0.0)
  low, high = np.percentile(paces, INTERVAL)
  pace = float(np.mean(paces))
  doubts = recorded.doubts + _too_wide(recorded, pace, float(low), float(high))
  if stopped:
    doubts += (
      f"in {stopped} of {repetitions} simulations too few replicas were left to"
      " take all steps",
    )
  if n > recorded.replicas:
    doubts += (
      f"{recorded.replicas} replicas were recorded: those beyond are taken to be"
      " like these",
    )
  return Prediction(pace, float(low), float(high), doubts)


def _too_wide(
  recorded: Recorded, pace: float, low: float, high: float
) -> tuple[str, ...]:
  if pace <= 0:
    return ("in the simulation the run stands still",)
  half = (high - low) / 2 / pace
  if half <= _GOAL:
    return ()
  needed = math.ceil(recorded.steps * (half / _GOAL) ** 2 / 10) * 10
  return (
    f"too short: {recorded.steps} steps tell the pace to {half:.0%}; about"
    f" {needed} would tell it to {_GOAL:.0%}",
  )
