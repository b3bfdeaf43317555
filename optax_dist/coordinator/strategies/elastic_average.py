"""Elastic averaging: replica and center move towards each other."""

from __future__ import annotations

from typing import Any

import jax
import optax

from optax_dist._internal import checks
from optax_dist.coordinator.strategies import strategy
from optax_dist.coordinator.strategies.local_steps import LocalState, LocalSteps

# The center accepts an exchange however old the parameters are.
_ANY_STALENESS = 2**31 - 1


class ElasticAverage(LocalSteps):
  """Elastic averaging: replica and center move towards each other.

  Source: Zhang, Choromanska and LeCun 2015, Deep learning with Elastic
  Averaging SGD, algorithm 1.
  """

  name = "elastic_average"
  # Exchanges are sequential, each of one replica.
  alone = True
  additive = False

  def __init__(
    self,
    inner: optax.GradientTransformation,
    total_num_replicas: int,
    *,
    moving_rate: float,
    communication_period: int = 10,
  ):
    super().__init__(inner, communication_period)
    checks.fraction("moving_rate", moving_rate)
    if not 0.0 < moving_rate < 1.0:
      raise ValueError(
        f"moving_rate must be between 0 and 1, got {moving_rate!r}."
      )
    self.quorum = strategy.Quorum(1, total_num_replicas, _ANY_STALENESS)
    rate = float(moving_rate)

    def apply(shared: strategy.SharedState, mean: Any) -> strategy.SharedState:
      params = strategy.owned(mean, shared.params)
      center = jax.tree.map(
        lambda x, c: c + rate * (x - c), params, shared.params
      )
      return strategy.SharedState(center, shared.opt_state)

    self.apply = jax.jit(apply)
    self._pull = jax.jit(
      lambda own, center: jax.tree.map(
        lambda x, c: x - rate * (x - c), own, center
      )
    )

  def shared(self, params: Any) -> strategy.SharedState:
    return strategy.SharedState(params, ())

  def _payload(self, shared: strategy.SharedState, local: LocalState) -> Any:
    return local.params

  def settle(
    self,
    before: strategy.SharedState,
    after: Any,
    local: LocalState,
    mine: bool,
  ) -> LocalState:
    if not mine:
      return local
    params = self._pull(local.params, before.params)
    return LocalState(params, local.opt_state, 0)


def elastic_average(
  *,
  moving_rate: float,
  communication_period: int = 10,
) -> strategy.Factory:
  """Elastic averaging, as the `strategy` of `join` and `run_embedded`.

  Every `communication_period` steps a replica exchanges with the center:
  ``diff = params - center; params -= moving_rate * diff; center += moving_rate
  * diff``; the exchanges of several replicas are sequential.

  Args:
    moving_rate: how far both move, between 0 and 1.
    communication_period: steps from one exchange to the next.

  Raises:
    ValueError: an argument is out of range (raised by `join`).

  Source: Zhang, Choromanska and LeCun 2015, Deep learning with Elastic
  Averaging SGD; `tf.contrib.opt.ElasticAverageOptimizer`.
  """
  return lambda opt, quorum: ElasticAverage(
    opt,
    quorum.total_num_replicas,
    moving_rate=moving_rate,
    communication_period=communication_period,
  )
