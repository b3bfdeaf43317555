"""DiLoCo: groups train locally for a period, then exchange their changes."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale import rounds
from optax_dist.simulate.scale.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class _DiLoCo:
  period: int

  @property
  def name(self) -> str:
    return f"DiLoCo, period {self.period}"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    arrivals = order.arrivals(fleet.step, self.period)
    round_of = functools.partial(rounds.of_all, fleet, arrivals)

    def loss_of(n: int, this: rounds.Round) -> rounds.Loss:
      done = rng.random()
      # The others only wait if they exchange before the failure is detected.
      return rounds.Loss(
        done, max(0.0, fleet.detect - (1 - done) * this.seconds)
      )

    # A returning group takes part from the next round on.
    wait = round_of(fleet.groups).seconds / 2
    return rounds.run(
      fleet,
      seconds,
      rng,
      round_of,
      loss_of,
      fleet.restart + fleet.catch_up + wait,
    )


def diloco(period: int) -> _DiLoCo:
  """Groups exchange the change of their parameters every `period` steps.

  A group that fails loses its work since the last exchange.

  Args:
    period: steps between exchanges.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: it is not a positive integer.

  Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of
  Language Models, 2023.

  Example:
    >>> diloco(50).name
    'DiLoCo, period 50'
  """
  if type(period) is not int or period < 1:
    raise ValueError(f"period must be a positive integer, got {period!r}.")
  return _DiLoCo(period)
