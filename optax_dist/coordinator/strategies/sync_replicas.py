"""Every replica sends gradients; the mean of k fresh ones is applied."""

from __future__ import annotations

from typing import Any

import optax

from optax_dist.coordinator.strategies import strategy


class SyncReplicas:
  """Every replica sends gradients; the mean of k fresh ones is applied."""

  name = "sync_replicas"
  alone = False
  period = 1
  policy = loop = None

  def __init__(
    self, optimizer: optax.GradientTransformation, quorum: strategy.Quorum
  ):
    self.quorum = quorum
    self._init = optimizer.init
    self.apply = strategy.applied_by(optimizer)

  def shared(self, params: Any) -> strategy.SharedState:
    return strategy.SharedState(params, self._init(params))

  def exchanged(self, params: Any) -> Any:
    return params

  def local(self, shared: strategy.SharedState) -> Any:
    return ()

  def lent(self, local: Any) -> Any:
    return None

  def params(self, shared: strategy.SharedState, local: Any) -> Any:
    return shared.params

  def contribute(self, shared: Any, local: Any, grads: Any) -> tuple[Any, Any]:
    return grads, local

  def settle(self, before: Any, after: Any, local: Any, mine: bool) -> Any:
    return local

  def forget(self, shared: Any, local: Any) -> Any:
    return local
