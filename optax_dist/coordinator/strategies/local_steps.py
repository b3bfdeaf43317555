"""Replicas that train locally between two exchanges."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax

from optax_dist._internal import checks
from optax_dist.coordinator.strategies import strategy


class LocalState(NamedTuple):
  """The local state of a replica between exchanges.

  Attributes:
    params: its own parameters.
    opt_state: state of its own optimizer.
    steps: steps taken since its last exchange.
  """

  params: Any
  opt_state: Any
  steps: int


class LocalSteps:
  """Replicas that train locally for some steps."""

  policy = loop = None

  def __init__(
    self, inner: optax.GradientTransformation, communication_period: int
  ):
    self.period = checks.count("communication_period", communication_period)
    self._init = inner.init
    self._update = strategy.applied_by(inner)

  def exchanged(self, params: Any) -> Any:
    return params

  def local(self, shared: strategy.SharedState) -> LocalState:
    return LocalState(shared.params, self._init(shared.params), 0)

  def lent(self, local: LocalState) -> Any:
    return None

  def params(self, shared: strategy.SharedState, local: LocalState) -> Any:
    return local.params

  def contribute(
    self, shared: strategy.SharedState, local: LocalState, grads: Any
  ) -> tuple[Any, LocalState]:
    if local.steps < self.period:
      own = strategy.SharedState(local.params, local.opt_state)
      after = self._update(own, grads)
      local = LocalState(after.params, after.opt_state, local.steps + 1)
    if local.steps < self.period:
      return None, local
    return self._payload(shared, local), local

  def forget(
    self, shared: strategy.SharedState, local: LocalState
  ) -> LocalState:
    return LocalState(shared.params, local.opt_state, 0)

  def _payload(self, shared: strategy.SharedState, local: LocalState) -> Any:
    raise NotImplementedError
