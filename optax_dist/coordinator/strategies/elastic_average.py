"""Elastic averaging: replica and center move towards each other."""

from __future__ import annotations

from typing import Any

import jax

from optax_dist import quorum as rules
from optax_dist._internal import checks
from optax_dist.coordinator.strategies import strategy
from optax_dist.coordinator.strategies.local_steps import LocalSteps


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
    ValueError: an argument is out of range.

  Source: Zhang, Choromanska and LeCun 2015, Deep learning with Elastic
  Averaging SGD, algorithm 1; `tf.contrib.opt.ElasticAverageOptimizer`.
  """
  period = checks.count("communication_period", communication_period)
  checks.fraction("moving_rate", moving_rate)
  if moving_rate in (0, 1):
    raise ValueError(f"moving_rate must be between 0 and 1, got {moving_rate}.")
  rate = float(moving_rate)

  def towards(params: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, c: x + rate * (c - x), params, other)

  @jax.jit
  def apply(shared: strategy.SharedState, mean: Any) -> strategy.SharedState:
    params = strategy.owned(mean, shared.params)
    return shared._replace(params=towards(shared.params, params))

  return lambda opt, quorum: LocalSteps(
    "elastic_average",
    opt,
    period,
    # The center accepts an exchange however old the parameters are.
    strategy.Quorum(1, quorum.total_num_replicas, rules.UNBOUNDED),
    alone=True,
    shared=lambda params: strategy.SharedState(params, ()),
    payload=lambda center, params: params,
    apply=apply,
    pull=jax.jit(towards),
  )
