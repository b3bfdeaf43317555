"""Every replica sends gradients; the mean of k fresh ones is applied."""

from __future__ import annotations

from typing import Any

import optax

from optax_dist.coordinator.strategies import strategy


class SyncReplicas(strategy.WaitingStrategy):
  """Every replica sends gradients; the mean of k fresh ones is applied."""

  name = "sync_replicas"

  def __init__(
    self, optimizer: optax.GradientTransformation, quorum: strategy.Quorum
  ):
    self.quorum = quorum
    self._init = strategy.initialized_by(optimizer)
    self.apply = strategy.applied_by(optimizer)

  def shared(self, params: Any) -> strategy.SharedState:
    return strategy.SharedState(params, self._init(params))
