"""Local steps; an outer optimizer applies the replicas' mean change."""

from __future__ import annotations

from typing import Any

import jax
import optax

from optax_dist.coordinator.strategies import strategy
from optax_dist.coordinator.strategies.local_steps import LocalState, LocalSteps


class LocalUpdates(LocalSteps):
  """Local steps; an outer optimizer applies the replicas' mean change.

  Source: Douillard et al. 2023, DiLoCo; McMahan et al. 2017, FedAvg.
  """

  name = "local_updates"
  alone = False
  additive = True

  def __init__(
    self,
    inner: optax.GradientTransformation,
    quorum: strategy.Quorum,
    *,
    outer_optimizer: optax.GradientTransformation | None = None,
    communication_period: int = 10,
  ):
    super().__init__(inner, communication_period)
    if quorum.replicas_to_aggregate > quorum.total_num_replicas:
      raise ValueError(
        "local updates need replicas_to_aggregate to be at most "
        f"total_num_replicas={quorum.total_num_replicas}, got "
        f"{quorum.replicas_to_aggregate}: one replica has one change to give."
      )
    self.quorum = quorum
    outer = outer_optimizer or optax.sgd(1.0)
    self._init_outer = outer.init
    self.apply = strategy.applied_by(outer)
    self._change = jax.jit(
      lambda old, new: jax.tree.map(lambda a, b: a - b, old, new)
    )

  def shared(self, params: Any) -> strategy.SharedState:
    return strategy.SharedState(params, self._init_outer(params))

  def _payload(self, shared: strategy.SharedState, local: LocalState) -> Any:
    return self._change(shared.params, local.params)

  def settle(
    self,
    before: Any,
    after: strategy.SharedState,
    local: LocalState,
    mine: bool,
  ) -> LocalState:
    # A replica that is behind restarts from the shared parameters.
    return LocalState(after.params, local.opt_state, 0)


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

  Source: McMahan et al. 2017, FedAvg; Douillard et al. 2023, DiLoCo.
  """
  return lambda opt, quorum: LocalUpdates(
    opt,
    quorum,
    outer_optimizer=outer_optimizer,
    communication_period=communication_period,
  )
