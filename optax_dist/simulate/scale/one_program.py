"""One program on all chips: a failure of any of them stops it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize

from optax_dist.coordinator.metrics import goodput
from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale.fleet import Fleet


def one_program_goodput(
  interval: float, save: float, down: float, between: float
) -> float:
  """The share of time spent on work that is not lost, in closed form.

  Args:
    interval: seconds of work between checkpoints.
    save: seconds to save a checkpoint.
    down: seconds from a failure until work continues; failures in it count too.
    between: mean seconds between failures, exponentially distributed.

  Returns:
    The share.

  Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval
  for restart dumps, 2006, equation 12.

  Example:
    >>> round(one_program_goodput(3600, 60, 300, 86400), 4)
    0.9596
  """
  cycle = (
    between * math.exp(down / between) * math.expm1((interval + save) / between)
  )
  return interval / cycle


def best_checkpoint_interval(save: float, between: float) -> float:
  """The optimal number of seconds of work between checkpoints.

  Args:
    save: seconds to save a checkpoint.
    between: mean seconds between failures.

  Returns:
    The interval; infinite without failures.

  Source: Daly 2006; to first order it is Young's sqrt(2 * save * between).

  Example:
    >>> round(best_checkpoint_interval(60, 86400))
    3180
  """
  if math.isinf(between):
    return math.inf
  if save <= 0:
    return 1e-9 * between
  # interval / (exp((interval + save) / between) - 1) is largest where
  # (1 - x) * exp(x + save / between) = 1, with x = interval / between.
  ratio = save / between
  x = optimize.brentq(
    lambda x: math.log1p(-x) + x + ratio, 0.0, 1 - 0.5 * math.exp(-1 - ratio)
  )
  return between * x


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The checkpoint interval: a given number of seconds, or the optimum."""

  interval: float | None

  def __post_init__(self) -> None:
    if self.interval is not None and not 0 < self.interval < math.inf:
      raise ValueError(
        f"checkpoint_interval must be a number of seconds above 0, got"
        f" {self.interval!r}."
      )

  def __str__(self) -> str:
    if self.interval is None:
      return "checkpoints at the best interval"
    return f"checkpoints every {self.interval:.4g} s"

  def seconds(self, fleet: Fleet, run: float) -> float:
    """Seconds between checkpoints; without failures the whole run's."""
    interval = self.interval
    if interval is None:
      interval = best_checkpoint_interval(
        fleet.save, fleet.mean_time_between_failures
      )
    return min(interval, run)


@dataclasses.dataclass(frozen=True)
class _OneProgram:
  checkpoints: Checkpoints

  @property
  def name(self) -> str:
    return f"one program, {self.checkpoints}"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    between = fleet.mean_time_between_failures
    interval = self.checkpoints.seconds(fleet, seconds)
    arrivals, n = order.arrivals(fleet.step), fleet.groups
    exchange = fleet.exchange(n)
    step = arrivals.expected(n, n) + exchange
    down = fleet.detect + fleet.repair + fleet.restart + fleet.restore
    draw = lambda: rng.exponential(between) if between < math.inf else math.inf
    now = worked = saved = lost = recovered = 0.0
    while now < seconds:
      up = min(draw(), seconds - now)
      cycles = math.floor(up / (interval + fleet.save))
      worked += cycles * interval
      saved += cycles * fleet.save
      rest = up - cycles * (interval + fleet.save)
      now += up
      if now >= seconds:
        worked += min(rest, interval)
        saved += max(0.0, rest - interval)
        break
      lost += rest
      # A failure during recovery restarts it.
      while True:
        part = min(draw(), down, seconds - now)
        now += part
        recovered += part
        if part >= down or now >= seconds:
          break
    useful = worked * arrivals.mean / step
    exchanging = worked * exchange / step
    spent = {
      "useful": useful,
      "exchanging": exchanging,
      "waiting": worked - useful - exchanging,
      "dropped": lost,
      "recovery": saved + recovered,
    }
    return goodput.make(
      {k: fleet.chips * max(0.0, s) for k, s in spent.items()}
    )


def one_program(checkpoint_interval: float | None = None) -> _OneProgram:
  """All chips run one program; after a failure it restarts from a checkpoint.

  It waits until the failed group has working chips again, restarts, and loses
  its work since the last checkpoint.

  Args:
    checkpoint_interval: seconds of work between checkpoints; None for the
      optimum.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: the interval is not above 0.

  Example:
    >>> one_program(600).name
    'one program, checkpoints every 600 s'
  """
  return _OneProgram(Checkpoints(checkpoint_interval))
