"""Runs a strategy on a fleet, for long enough to be meaningful."""

from __future__ import annotations

import math
import numbers
from typing import Protocol

import numpy as np

from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale.fleet import Fleet

_FAILURES = 2000
_ROUNDS = 20  # Failures with their repairs, at least.


class Strategy(Protocol):
  """How a fleet trains; each strategy has its own file.

  Attributes:
    name: its name in tables and plots.
  """

  @property
  def name(self) -> str: ...

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    """Trains in virtual time.

    Args:
      fleet: the fleet.
      seconds: virtual time.
      rng: draws the failures.

    Returns:
      How the time was spent, in chip-seconds, about `fleet.chips * seconds` in
      all.
    """


def simulate_fleet(
  strategy: Strategy,
  fleet: Fleet,
  *,
  seconds: float | None = None,
  seed: int = 0,
) -> Goodput:
  """How the time of all chips is spent under a strategy.

  Args:
    strategy: such as `one_program(600)`.
    fleet: the fleet to train on.
    seconds: virtual time; None for about 2,000 failures.
    seed: equal seeds give equal outcomes.

  Returns:
    Chip-seconds by category.

  Raises:
    ValueError: `seconds` is not above 0.

  Example:
    >>> from optax_dist import simulate
    >>> from optax_dist.simulate import scale
    >>> fleet = scale.Fleet(1024, 8, simulate.parse_latency("constant:1"),
    ...   failure_rate=1e-7, repair=600.0, restart=60.0, catch_up=30.0)
    >>> outcome = simulate_fleet(scale.replica_groups(), fleet)
    >>> f"{outcome.goodput:.3f}"
    '0.999'
  """
  seconds = duration(fleet, seconds)
  return strategy(fleet, seconds, np.random.default_rng(seed))


def duration(fleet: Fleet, seconds: float | None) -> float:
  """The seconds to simulate; None for about 2,000 failures.

  Raises:
    ValueError: it is not above 0.
  """
  if seconds is None:
    between = fleet.mean_time_between_failures
    once = fleet.repair + fleet.detect + fleet.restart + fleet.restore
    seconds = max(_FAILURES * between, _ROUNDS * (between + once))
    if math.isinf(seconds):
      seconds = 1000 * fleet.step.mean
  if not isinstance(seconds, numbers.Real) or not 0 < seconds < math.inf:
    raise ValueError(f"seconds must be a number above 0, got {seconds!r}.")
  return seconds
