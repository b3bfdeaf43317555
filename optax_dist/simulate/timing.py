"""The results of a timing simulation: steps, drops, and how time was spent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optax_dist.coordinator.metrics.time_ledger import Goodput, TimeLedger
from optax_dist.simulate.strategy import Strategy

CONTRIBUTIONS = ("applied", "dropped", "lost")


class Timing(NamedTuple):
  """The outcome of a simulation of N replicas over S steps.

  It ends with the last step, also if replicas fail or return after that.

  Attributes:
    strategy: what was simulated.
    commit_times: when each step was committed, seconds, float64 `[S]`.
    applied: each replica's contributions that were applied, int64 `[N]`.
    dropped: each replica's contributions that were dropped as stale, int64
      `[N]`.
    lost: each replica's contributions that were lost in a failure, int64 `[N]`.
    times: how each replica spent its time, as a journal of it tells. Time whose
      outcome is open at the end is "idle".
    staleness: number of applied contributions by staleness in steps, int64
      `[largest + 1]`.
    steps_asked: number of steps that were to be simulated.
  """

  strategy: Strategy
  commit_times: np.ndarray
  applied: np.ndarray
  dropped: np.ndarray
  lost: np.ndarray
  times: TimeLedger
  staleness: np.ndarray
  steps_asked: int

  @property
  def stopped(self) -> bool:
    """Whether too few replicas were left before the last step asked for."""
    return self.commit_times.size < self.steps_asked

  @property
  def replicas(self) -> int:
    """The number of replicas."""
    return self.applied.size

  @property
  def duration(self) -> float:
    """Seconds until the last step."""
    return float(self.commit_times[-1])

  @property
  def steps_per_second(self) -> float:
    """Steps per second of virtual time."""
    return self.commit_times.size / self.duration

  @property
  def gradients_per_second(self) -> float:
    """Gradients in these steps per second."""
    return int(self.applied.sum()) / self.duration

  @property
  def dropped_share(self) -> float:
    """The share of all completed contributions that was dropped."""
    out = int(self.dropped.sum()) + int(self.lost.sum())
    return out / max(1, out + int(self.applied.sum()))

  @property
  def mean_staleness(self) -> float:
    """The mean staleness of applied contributions, in steps."""
    late = np.arange(self.staleness.size) * self.staleness
    return float(late.sum()) / max(1, int(self.staleness.sum()))

  def goodput(self) -> Goodput:
    """All replicas' time by category, in replica-seconds."""
    return self.times.goodput()
