"""Backups: a step takes the first k gradients of the groups that are up."""

from __future__ import annotations

import dataclasses

import numpy as np

from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale import rounds
from optax_dist.simulate.scale.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class _BackupGroups:
  k: int

  @property
  def name(self) -> str:
    return f"backups, {self.k:,} of N"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    k = self.k
    if k > fleet.groups:
      raise ValueError(
        f"replicas_to_aggregate must be at most the number of groups"
        f" ({fleet.groups}), got {k}."
      )
    arrivals = order.arrivals(fleet.step)

    def round_of(n: int) -> rounds.Round:
      if n < k:
        return rounds.Round(0.0, idle=1.0)
      last, first = arrivals.expected(k, n), arrivals.mean_of_first(k, n)
      return rounds.Round(
        k / n * first,
        waiting=k / n * max(0.0, last - first),
        exchanging=fleet.exchange(k),
        dropped=(n - k) / n * last,
      )

    def loss_of(n: int, this: rounds.Round) -> rounds.Loss:
      # Backups step in; without any, the others wait for the detection.
      return rounds.Loss(rng.random(), fleet.detect if n <= k else 0.0)

    return rounds.run(
      fleet, seconds, rng, round_of, loss_of, fleet.restart + fleet.catch_up
    )


def backup_groups(replicas_to_aggregate: int) -> _BackupGroups:
  """A step takes the first k gradients; late groups drop theirs at once.

  While fewer than k groups are up, no step is taken.

  Args:
    replicas_to_aggregate: k.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: it is not a positive integer.

  Example:
    >>> backup_groups(120).name
    'backups, 120 of N'
  """
  k = replicas_to_aggregate
  if type(k) is not int or k < 1:
    raise ValueError(
      f"replicas_to_aggregate must be a positive integer, got {k!r}."
    )
  return _BackupGroups(k)
