"""Local steps; an outer optimizer applies the replicas' mean change."""

from __future__ import annotations

import jax
import optax

from optax_dist._internal import checks
from optax_dist.coordinator.strategies import strategy
from optax_dist.coordinator.strategies.local_steps import LocalSteps


def local_updates(
  outer_optimizer: optax.GradientTransformation | None = None,
  *,
  communication_period: int = 10,
) -> strategy.Factory:
  """Local updates, as the `strategy` of `join` and `run_embedded`.

  A replica takes `communication_period` steps with its own optimizer; then the
  outer optimizer is applied to the mean of ``center - params`` over
  `replicas_to_aggregate` replicas, and all continue from the new center.

  Args:
    outer_optimizer: for the center; by default SGD with a learning rate of 1,
      which makes the center the mean of the replicas.
    communication_period: steps from one round to the next.

  Raises:
    ValueError: the period is out of range; and, in `join`, a replica would have
      to give several changes.

  Source: McMahan et al. 2017, FedAvg; Douillard et al. 2023, DiLoCo.
  """
  period = checks.count("communication_period", communication_period)
  outer = optax.sgd(1.0) if outer_optimizer is None else outer_optimizer
  init = strategy.initialized_by(outer, "outer_optimizer")

  def make(
    opt: optax.GradientTransformation, quorum: strategy.Quorum
  ) -> LocalSteps:
    if quorum.replicas_to_aggregate > quorum.total_num_replicas:
      raise ValueError(
        "local updates need replicas_to_aggregate to be at most "
        f"total_num_replicas={quorum.total_num_replicas}, got "
        f"{quorum.replicas_to_aggregate}: one replica has one change to give."
      )
    return LocalSteps(
      "local_updates",
      opt,
      period,
      quorum,
      alone=False,
      shared=lambda params: strategy.SharedState(params, init(params)),
      payload=jax.jit(optax.tree.sub),
      apply=strategy.applied_by(outer),
    )

  return make
