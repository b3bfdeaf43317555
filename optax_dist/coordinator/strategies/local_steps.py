"""Replicas that train locally between two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from optax_dist.coordinator.strategies import hyperparams, strategy


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


class LocalSteps(strategy.WaitingStrategy):
  """Replicas that train locally for some steps, and exchange then.

  `elastic_average` and `local_updates` say what an exchange does.
  """

  period: int

  def __init__(
    self,
    name: str,
    inner: optax.GradientTransformation,
    period: int,
    quorum: strategy.Quorum,
    *,
    alone: bool,
    shared: Callable[[Any], strategy.SharedState],
    payload: Callable[[Any, Any], Any],
    apply: Callable[[strategy.SharedState, Any], strategy.SharedState],
    pull: Callable[[Any, Any], Any] | None = None,
  ):
    """Creates the strategy.

    Args:
      name: see `strategy.Strategy`; likewise `quorum`, `shared` and `apply`.
      inner: the optimizer of each replica.
      period: local steps from one exchange to the next.
      quorum: the configuration of the rules.
      alone: whether exchanges are of one replica each.
      shared: the initial shared state.
      payload: what to send, given the center and the replica's parameters.
      apply: the shared state after an exchange.
      pull: the replica's parameters after an exchange of its own, given these
        and the center before it; None: all replicas start from the new center.
    """
    self.name, self.period, self.quorum = name, period, quorum
    self.alone, self.apply = alone, apply
    self._shared, self._payload, self._pull = shared, payload, pull
    self.reads_before = pull is not None
    self._init = strategy.initialized_by(inner)
    self._update = strategy.applied_by(inner)

  def shared(self, params: Any) -> strategy.SharedState:
    own = hyperparams.find(self._init(params))
    return self._shared(params)._replace(hyperparams=own)

  def local(
    self, shared: strategy.SharedState, inner_state: Any = None
  ) -> LocalState:
    if inner_state is None:
      inner_state = self._init(shared.params)
    inner_state = hyperparams.put(inner_state, shared.hyperparams)
    return LocalState(shared.params, inner_state, 0)

  def inner_state(self, local: LocalState) -> Any:
    return local.opt_state

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
    return self._payload(shared.params, local.params), local

  def so_far(
    self, shared: strategy.SharedState, local: LocalState
  ) -> tuple[Any, float]:
    sent = self._payload(shared.params, local.params)
    return sent, local.steps / self.period

  def settle(
    self,
    before: strategy.SharedState,
    after: strategy.SharedState,
    local: LocalState,
    mine: bool,
  ) -> LocalState:
    new = self.local(after, local.opt_state)
    if self._pull is None:
      return new
    if not mine:
      return local._replace(opt_state=new.opt_state)
    return new._replace(params=self._pull(local.params, before.params))
