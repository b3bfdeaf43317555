"""Elastic restart: after a failure all restart on the remaining groups."""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np

from optax_dist.coordinator.metrics import goodput
from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale.fleet import Fleet
from optax_dist.simulate.scale.one_program import Checkpoints


class _Run:
  """A run in progress.

  Attributes:
    up: groups that take part.
    pending: useful group-seconds since the last checkpoint.
  """

  def __init__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> None:
    self.fleet, self.seconds, self.rng = fleet, seconds, rng
    self.arrivals = order.arrivals(fleet.step)
    self.now = self.pending = 0.0
    self.up = fleet.groups
    self.returns: list[float] = []
    self.spent = dict.fromkeys(goodput.CATEGORIES, 0.0)

  def failure(self) -> float:
    """Seconds until the next failure of a running group."""
    rate = self.up * self.fleet.group_failure_rate
    return self.rng.exponential(1 / rate) if rate else math.inf

  def idle(self, seconds: float) -> None:
    """Groups that are down stay down for a while."""
    self.now += seconds
    self.spent["idle"] += (self.fleet.groups - self.up) * seconds

  def work(self, seconds: float) -> None:
    n = self.up
    exchange = self.fleet.exchange(n)
    step = self.arrivals.expected(n, n) + exchange
    useful = n * seconds * self.arrivals.mean / step
    exchanging = n * seconds * exchange / step
    self.pending += useful
    self.spent["exchanging"] += exchanging
    self.spent["waiting"] += max(0.0, n * seconds - useful - exchanging)
    self.idle(seconds)

  def stand(self, seconds: float) -> None:
    """All groups are stopped, and nothing happens."""
    self.spent["recovery"] += self.up * seconds
    self.idle(seconds)

  def saved(self) -> None:
    self.spent["useful"] += self.pending
    self.pending = 0.0

  def fail(self) -> None:
    self.spent["dropped"] += self.pending
    self.pending = 0.0
    self.up -= 1
    heapq.heappush(self.returns, self.now + self.fleet.repair)

  def take_back(self) -> bool:
    """Lets repaired groups rejoin; returns whether there were any."""
    before = self.up
    while self.returns and self.returns[0] <= self.now:
      heapq.heappop(self.returns)
      self.up += 1
    return self.up > before

  def recover(self, seconds: float) -> None:
    """All groups recover; a failure meanwhile restarts the recovery."""
    fleet = self.fleet
    again = fleet.detect + fleet.reshard + fleet.restart + fleet.restore
    left = seconds
    while left > 0 and self.now < self.seconds:
      failure = self.failure()
      part = min(failure, left, self.seconds - self.now)
      self.spent["recovery"] += self.up * part
      self.idle(part)
      left -= part
      if part == failure and left > 0:
        self.fail()
        left = again
      self.take_back()
      if not self.up:
        return


@dataclasses.dataclass(frozen=True)
class _ElasticRestart:
  checkpoints: Checkpoints

  @property
  def name(self) -> str:
    return f"elastic restart, {self.checkpoints}"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    interval = self.checkpoints.seconds(fleet, seconds)
    run = _Run(fleet, seconds, rng)
    again = fleet.detect + fleet.reshard + fleet.restart + fleet.restore
    while run.now < seconds:
      if not run.up:
        until = min(run.returns[0], seconds)
        run.idle(max(0.0, until - run.now))
        if run.take_back():
          run.recover(again)
        continue
      failure = run.failure()
      back = run.returns[0] - run.now if run.returns else math.inf
      window = min(failure, max(0.0, back), seconds - run.now)
      cycles = math.floor(window / (interval + fleet.save))
      run.work(cycles * interval)
      run.saved()
      run.stand(cycles * fleet.save)
      rest = window - cycles * (interval + fleet.save)
      run.work(min(rest, interval))
      run.stand(max(0.0, rest - interval))  # An incomplete checkpoint.
      if window == failure:
        run.fail()
        run.recover(again)
      elif run.take_back():
        # They save first, so no work is lost.
        run.saved()
        run.recover(fleet.save + fleet.reshard + fleet.restart)
    run.saved()
    chips = fleet.chips_per_group
    return goodput.make({k: chips * s for k, s in run.spent.items()})


def elastic_restart(
  checkpoint_interval: float | None = None,
) -> _ElasticRestart:
  """All chips run one program, which restarts on the groups that are up.

  A failure costs the work since the last checkpoint and a restart on the
  remaining groups; a repaired group costs a restart, too.

  Args:
    checkpoint_interval: seconds of work between checkpoints; None for the
      optimum.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: the interval is not above 0.

  Example:
    >>> elastic_restart(600).name
    'elastic restart, checkpoints every 600 s'
  """
  return _ElasticRestart(Checkpoints(checkpoint_interval))
