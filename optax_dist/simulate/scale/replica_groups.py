"""Replica groups: a step takes all that are up; a failed group is left out."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale import rounds
from optax_dist.simulate.scale.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class _ReplicaGroups:
  name: str = "replica groups"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    arrivals = order.arrivals(fleet.step)
    round_of = functools.partial(rounds.of_all, fleet, arrivals)

    return rounds.run(
      fleet,
      seconds,
      rng,
      round_of,
      lambda n, this: rounds.Loss(rng.random(), fleet.detect),
      fleet.restart + fleet.catch_up,
    )


def replica_groups() -> _ReplicaGroups:
  """Every step waits for all groups that are up.

  A group that fails loses its gradient of that step, and holds the others up
  until they detect the failure. It rejoins with the state of another group.

  Returns:
    The strategy, for `simulate_fleet`.

  Example:
    >>> replica_groups().name
    'replica groups'
  """
  return _ReplicaGroups()
