"""The strategy interface: shared state, local state, and what replicas send.

A strategy has a *shared* state, bit-identical on all replicas and changed only
by commits, and a *local* one. The coordinator knows nothing else about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist.coordinator.protocol.entries import Fragments


class Quorum(NamedTuple):
  """Numbers of the quorum's rules, as in `protocol.config.Config`.

  Attributes:
    replicas_to_aggregate: gradients in a step.
    total_num_replicas: replicas expected at the start.
    max_staleness: largest staleness of a gradient, in steps.
    weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether graceful leaves lower the quorum.
    lower_on_loss: whether lost replicas lower it too.
  """

  replicas_to_aggregate: int
  total_num_replicas: int
  max_staleness: int = 0
  weight: str | None = None
  lower_on_leave: bool = True
  lower_on_loss: bool = False


class Strategy:
  """The interface between the coordinator and a strategy.

  Attributes:
    name: its name in the journal.
    quorum: the configuration of the quorum's rules.
    apply: returns the shared state after a commit, given the state before it and the
      mean of the contributions; deterministic.
    reads_before: whether `settle` reads the state before a commit, which is kept.
    alone: whether no two replicas may take part in one step.
    period: gradients per submission: the number of local steps, or 1; None if one
      gradient is part of several steps.
    fragments: the rules of Decoupled DiLoCo; None: steps are taken by the quorum's
      rules alone.
    loop: makes the `Loop` of a `Participant`, if its replicas don't wait for each
      step; None: `SynchronousLoop`, for a `WaitingStrategy`.
  """

  name: str
  quorum: Quorum
  apply: Callable[[Any, Any], Any]
  reads_before = False
  alone = False
  period: int | None = 1
  fragments: Fragments | None = None
  loop: Callable[[Any], Any] | None = None

  def shared(self, params: Any) -> Any:
    """The initial shared state."""
    raise NotImplementedError

  def exchanged(self, params: Any) -> Any:
    """The structure of a contribution, and of the mean: shapes and dtypes."""
    return params

  def local(self, shared: Any, inner_state: Any = None) -> Any:
    """The local state of a replica that starts from a shared state.

    Args:
      shared: the shared state.
      inner_state: state of its own optimizer; None for a fresh one.
    """
    return ()

  def params(self, shared: Any, local: Any) -> Any:
    """The parameters to compute the next gradient on."""
    return shared.params

  def inner_state(self, local: Any) -> Any:
    """The state of a replica's own optimizer; None if it has none.

    It is the part of a local state that outlives the replica: replicas that join
    get it, and checkpoints hold it.
    """
    return None


class WaitingStrategy(Strategy):
  """A strategy whose replicas wait for the outcome of each submission."""

  def contribute(self, shared: Any, local: Any, grads: Any) -> tuple[Any, Any]:
    """The contribution to send (None for nothing yet), and the new local state."""
    return grads, local

  def so_far(self, shared: Any, local: Any) -> tuple[Any, float] | None:
    """A contribution during a round of local steps, and its share of a whole round.

    None if the strategy has no rounds of local steps.
    """
    return None

  def settle(self, before: Any, after: Any, local: Any, mine: bool) -> Any:
    """The local state after a commit, with or without this replica's part.

    Args:
      before: the shared state before the commit; None without `reads_before`.
      after: the shared state after the commit.
      local: the local state.
      mine: whether this replica is part of the commit.
    """
    return local


class SharedState(NamedTuple):
  """The state that all replicas share.

  Attributes:
    params: the model's parameters, or the center.
    opt_state: state of the optimizer that is applied at commits.
    hyperparams: of the replicas' own optimizers, as `hyperparams.find` returns
      them; () if they have none.
  """

  params: Any
  opt_state: Any
  hyperparams: Any = ()


# Updates after which dtypes stay: that of one number may follow from another's.
_UPDATES = 3


def initialized_by(
  optimizer: optax.GradientTransformation, name: str = "opt"
) -> Callable[[Any], Any]:
  """A function that initializes an optimizer's state, with the dtypes after an update.

  The dtypes of `init` may differ if parameters are narrower than float32: a state that
  is sent or saved would lose digits.

  Args:
    optimizer: the optimizer.
    name: name of the argument, for the error.

  Raises:
    TypeError: it is no optimizer; or, in what is returned, a gradient is not enough
      for it.
  """
  if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
    raise TypeError(
      f"`{name}` must be an optax.GradientTransformation, such as"
      f" optax.adam(1e-3), got {optimizer!r:.100}."
    )
  update = jax.jit(optax.with_extra_args_support(optimizer).update)

  def after(params: Any, state: Any) -> Any:
    try:
      return jax.eval_shape(update, params, state, params)[1]
    except TypeError as error:
      if "required keyword-only" not in str(error):
        raise
      raise TypeError(
        f"The optimizer needs more than gradients: {error}. A step of the"
        " coordinator is computed from the mean gradient alone. For a learning rate"
        " that depends on the loss use optax.inject_hyperparams and"
        " replica.set_hyperparams(...)."
      ) from error

  def init(params: Any) -> Any:
    state = jax.tree.map(jnp.asarray, optimizer.init(params))
    for _ in range(_UPDATES):
      state = jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype),
        state,
        after(params, state),
      )
    return state

  return init


def applied_by(
  optimizer: optax.GradientTransformation,
) -> Callable[..., SharedState]:
  """Compiles a function that applies a gradient, or the mean of several."""
  tx = optax.with_extra_args_support(optimizer)

  def apply(state: SharedState, grads: Any) -> SharedState:
    grads = owned(grads, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state)

  return jax.jit(apply)


def owned(mean: Any, params: Any) -> Any:
  """Copies the mean to new arrays with the parameters' dtypes.

  It arrives in memory of the exchange. A leaf passed on as it is (for example,
  kept in an optimizer's state) would change with the next step.
  """
  return jax.tree.map(lambda x, p: jnp.copy(x).astype(p.dtype), mean, params)


Factory = Callable[[optax.GradientTransformation, Quorum], Strategy]
