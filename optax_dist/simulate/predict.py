"""Predictions from a journal, with their uncertainty."""

from __future__ import annotations

import math
import types
from typing import NamedTuple

import numpy as np

from optax_dist._internal import checks
from optax_dist.simulate.engine import Failures, NoStepError, simulate_timing
from optax_dist.simulate.recorded import Recorded
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import INTERVAL, LEVEL
from optax_dist.simulate.warnings import of_losses

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
    warnings: why these numbers can't be trusted to 10 %, one line each; the text
      of a prediction with a warning has no number.
  """

  steps_per_second: float
  low: float
  high: float
  warnings: tuple[str, ...]

  def __str__(self) -> str:
    if self.warnings:
      return f"no prediction ({'; '.join(self.warnings)})"
    return (
      f"{self.steps_per_second:.4g} steps/s"
      f" ({LEVEL} %: {self.low:.4g} to {self.high:.4g})"
    )


class _Paces(NamedTuple):
  """The paces of the repetitions, and how many of these stopped too early."""

  paces: list[float]
  stopped: int


def predict(
  recorded: Recorded,
  strategy: Strategy | None = None,
  replicas: int | None = None,
  *,
  communication: float | None = None,
  failures: Failures | types.EllipsisType | None = ...,
  repetitions: int = 20,
) -> Prediction:
  """Predicts the pace of replicas like the recorded ones.

  The recorded run is simulated, too: if that is more than 10 % off its pace,
  something in it is not in the model, and the prediction has a warning.

  Args:
    recorded: a run from `from_journal`. Its rate of failures is as uncertain as
      its number of `losses` makes it; without any, it is taken to be exact.
    strategy: the strategy to predict; None for the recorded one.
    replicas: number of replicas; None for the recorded number. Further ones are
      taken to be like these.
    communication: seconds from the last gradient of a step until its members
      continue to compute; None for the recorded time.
    failures: the failures to predict with, taken to be exact; by default the recorded
      ones.
    repetitions: number of simulations, each as long as the recorded run, but of
      at most 500 steps.

  Returns:
    The prediction.

  Raises:
    ValueError: a number is out of range, or without failures no step is ever
      taken.
  """
  checks.kind("recorded", recorded, Recorded, "a run from from_journal")
  repetitions = checks.count("repetitions", repetitions, least=2)
  run = recorded
  warnings = recorded.warnings
  if failures is ...:
    warnings += of_losses(recorded.losses)
  else:
    if failures is not None:
      checks.kind("failures", failures, Failures, "simulate.Failures, or None")
    run = run._replace(failures=failures, losses=())
  if strategy is not None:
    run = run._replace(strategy=strategy)
  if replicas is not None:
    run = run._replace(replicas=replicas)
  if communication is not None:
    run = run._replace(communication=communication)
  paces, stopped = _simulate(run, repetitions)
  low, high = np.percentile(paces, INTERVAL)
  pace = float(np.mean(paces))
  warnings += _too_wide(recorded, pace, float(low), float(high))
  if stopped:
    warnings += (
      f"in {stopped} of {repetitions} simulations too few replicas were left to"
      " take all steps",
    )
  of_recorded = pace
  if run is not recorded and run != recorded:
    of_recorded = float(np.mean(_simulate(recorded, repetitions).paces))
  warnings += _differs(recorded, of_recorded)
  return Prediction(pace, float(low), float(high), warnings)


def _simulate(run: Recorded, repetitions: int) -> _Paces:
  """Simulates a run so often, each time with other times of the recorded ones."""
  steps = min(max(run.steps, 10), _MOST_STEPS)
  paces, stopped = [], 0
  seeds = np.random.SeedSequence(0).spawn(repetitions)
  for i, source in enumerate(seeds):
    rng = np.random.default_rng(source)
    failures = run.failures
    if failures is not None:
      # Resamples the failures observed in the same time.
      rate, count = failures.rate, len(run.losses)
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
        run.strategy,
        run.latency.resampled(rng),
        run.replicas,
        steps=steps + 1,
        seed=i,
        communication=run.communication,
        failures=failures,
      )
    except NoStepError:
      if failures is None:
        raise
      paces.append(0.0)  # All replicas were lost before a step.
      stopped += 1
      continue
    stopped += timing.stopped
    times = timing.commit_times
    # From the first step on, as for a journal.
    taken = times[-1] - times[0]
    paces.append((times.size - 1) / taken if taken > 0 else 0.0)
  return _Paces(paces, stopped)


def _differs(recorded: Recorded, pace: float) -> tuple[str, ...]:
  """Whether the simulation of the recorded run has another pace."""
  measured = recorded.steps_per_second
  if measured is None:
    return ("there are fewer than two steps to compare the simulation with",)
  if abs(pace / measured - 1) <= _GOAL:
    return ()
  return (
    f"something in the recorded run is not in the model: its simulation takes"
    f" {pace:.4g} steps/s, and it took {measured:.4g}",
  )


def _too_wide(
  recorded: Recorded, pace: float, low: float, high: float
) -> tuple[str, ...]:
  if pace <= 0:
    return ("in the simulation the run stands still",)
  half = (high - low) / 2 / pace
  # The interval is that of the simulated steps.
  half *= min(1.0, _MOST_STEPS / max(1, recorded.steps)) ** 0.5
  if half <= _GOAL:
    return ()
  needed = math.ceil(recorded.steps * (half / _GOAL) ** 2 / 10) * 10
  return (
    f"too short: {recorded.steps} steps tell the pace to {half:.0%}; about"
    f" {needed} would tell it to {_GOAL:.0%}",
  )
