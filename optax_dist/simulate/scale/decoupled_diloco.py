"""Decoupled DiLoCo: groups train on clocks of their own, and wait for nobody."""

from __future__ import annotations

import dataclasses

import numpy as np

from optax_dist.simulate.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale import rounds
from optax_dist.simulate.scale.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class _DecoupledDiLoCo:
  period: int

  @property
  def name(self) -> str:
    return f"decoupled DiLoCo, period {self.period}"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    computing = order.arrivals(fleet.step, self.period).mean

    def round_of(n: int) -> rounds.Round:
      # Fragments are exchanged while the next ones are computed.
      beyond = max(0.0, fleet.exchange(n) - computing)
      return rounds.Round(computing, exchanging=beyond)

    return rounds.run(
      fleet,
      seconds,
      rng,
      round_of,
      lambda n, this: rounds.Loss(rng.random(), 0.0),
      fleet.restart + fleet.catch_up,
    )


def decoupled_diloco(period: int) -> _DecoupledDiLoCo:
  """Groups exchange fragments while they compute on, each on its own clock.

  A group that fails takes its work since its last exchange with it, and holds
  nobody up. `optax_dist.simulate.decoupled_diloco` has a model of its own, with
  the quorum and numbers that are fitted to the paper's.

  Args:
    period: steps until every fragment was exchanged once.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: it is not a positive integer.

  Source: Douillard et al., Decoupled DiLoCo for Resilient Distributed
  Pre-training, 2026.

  Example:
    >>> decoupled_diloco(50).name
    'decoupled DiLoCo, period 50'
  """
  if type(period) is not int or period < 1:
    raise ValueError(f"period must be a positive integer, got {period!r}.")
  return _DecoupledDiLoCo(period)
