"""The results of a timing simulation: steps, drops, and how time was spent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from optax_dist.coordinator.metrics.time_ledger import Goodput

# Percent of the repetitions that an interval holds, and its percentiles.
LEVEL = 95
INTERVAL = (100 - LEVEL) / 2, 50 + LEVEL / 2


class Timing(NamedTuple):
  """The outcome of a simulation of N replicas over S steps.

  The simulated time ends with the last step, even if replicas fail or return later.

  Attributes:
    commit_times: when each step was committed, seconds, float64 `[S]`.
    numbers: what became of each replica's gradients, and how it spent its time,
      as a journal of it tells. Time whose outcome is open at the end is "idle".
    steps_requested: number of steps that were to be simulated.
  """

  commit_times: np.ndarray
  numbers: RunNumbers
  steps_requested: int

  @property
  def stopped(self) -> bool:
    """Whether too few replicas were left before the last step asked for."""
    return self.commit_times.size < self.steps_requested

  @property
  def duration(self) -> float:
    """Seconds until the last step."""
    return float(self.commit_times[-1])

  @property
  def steps_per_second(self) -> float:
    """Steps per second of virtual time."""
    return self.commit_times.size / self.duration

  @property
  def applied(self) -> int:
    """The number of gradients in these steps."""
    return sum(replica.accepted for replica in self.numbers.replicas.values())

  @property
  def dropped(self) -> int:
    """The number of gradients that were stale, or lost in a failure."""
    return sum(
      replica.dropped.total() for replica in self.numbers.replicas.values()
    )

  @property
  def gradients_per_second(self) -> float:
    """Gradients in these steps per second."""
    return self.applied / self.duration

  @property
  def dropped_share(self) -> float:
    """The share of all completed gradients that was dropped."""
    return self.dropped / max(1, self.dropped + self.applied)

  @property
  def mean_staleness(self) -> float:
    """The mean staleness of applied gradients, in steps."""
    return self.numbers.staleness.total / max(1, self.numbers.staleness.count)

  def goodput(self) -> Goodput:
    """All replicas' time by category, in replica-seconds."""
    return self.numbers.times.goodput()
