"""What replicas agree on, what each keeps for itself, and what they send.

A policy has a *shared* state, bit-identical on all replicas and changed only by
commits, and a *local* one. `chief` and `replica` know no more of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from optax_dist import quorum
from optax_dist.transforms.elastic_exchange import elastic_exchange

# A center takes an exchange however old the parameters are.
_ANY_STALENESS = 2**31 - 1


class Quorum(NamedTuple):
  """The numbers of the rules; see `optax_dist.quorum.init`.

  Attributes:
    replicas_to_aggregate: gradients that make a step.
    total_num_replicas: replicas expected at the start.
    max_staleness: steps by which a gradient may be late.
    weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether orderly leaves lower the quorum.
    lower_on_loss: whether lost replicas lower it too.
  """

  replicas_to_aggregate: int
  total_num_replicas: int
  max_staleness: int = 0
  weight: str | None = None
  lower_on_leave: bool = True
  lower_on_loss: bool = False

  def initial(self, global_step: int, two_phase: bool = True) -> quorum.State:
    """The rules' first state."""
    if self.weight not in (None, "inverse"):
      raise ValueError(
        f"staleness_weight must be None or 'inverse', got {self.weight!r}."
      )
    return quorum.init(
      self.replicas_to_aggregate,
      self.total_num_replicas,
      max_staleness=self.max_staleness,
      weight=quorum.inverse_staleness if self.weight else None,
      lower_on_leave=self.lower_on_leave or self.lower_on_loss,
      two_phase=two_phase,
      global_step=global_step,
    )


class Policy(Protocol):
  """What the coordinator asks of a strategy.

  Attributes:
    name: in the journal.
    quorum: the numbers of the rules.
    sums: whether `apply` is to be told of how many the mean is.
    alone: whether no two replicas may take part in one step.
  """

  name: str
  quorum: Quorum
  sums: bool
  alone: bool

  def shared(self, params: Any) -> Any:
    """The shared state at the start."""
    ...

  def local(self, shared: Any) -> Any:
    """The local state of one who has just joined."""
    ...

  def params(self, shared: Any, local: Any) -> Any:
    """The parameters that the replica computes its next gradient on."""
    ...

  def contribute(self, shared: Any, local: Any, grads: Any) -> tuple[Any, Any]:
    """What to send (None: nothing this time), and the local state then."""
    ...

  def apply(self, shared: Any, mean: Any, members: Any = None) -> Any:
    """The shared state after a commit of this mean; deterministic."""
    ...

  def settle(self, before: Any, after: Any, local: Any, mine: bool) -> Any:
    """The local state after a commit, in which the replica took part or not."""
    ...


class SharedState(NamedTuple):
  """What every replica holds alike.

  Attributes:
    params: the model's parameters, or the center.
    opt_state: of the optimizer that is applied at commits.
  """

  params: Any
  opt_state: Any


def _applied_by(
  optimizer: optax.GradientTransformation,
) -> Callable[..., SharedState]:
  """A compiled function that applies a gradient, or the mean of some."""
  tx = optax.with_extra_args_support(optimizer)

  def apply(state: SharedState, grads: Any) -> SharedState:
    grads = _owned(grads, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return SharedState(optax.apply_updates(state.params, updates), opt_state)

  return jax.jit(apply)


class SyncReplicas:
  """Every replica sends gradients; the mean of k fresh ones is applied."""

  name = "sync_replicas"
  sums = alone = False

  def __init__(self, optimizer: optax.GradientTransformation, quorum: Quorum):
    self.quorum = quorum
    self._init = optimizer.init
    self.apply = _applied_by(optimizer)

  def shared(self, params: Any) -> SharedState:
    return SharedState(params, self._init(params))

  def local(self, shared: SharedState) -> Any:
    return ()

  def params(self, shared: SharedState, local: Any) -> Any:
    return shared.params

  def contribute(self, shared: Any, local: Any, grads: Any) -> tuple[Any, Any]:
    return grads, local

  def settle(self, before: Any, after: Any, local: Any, mine: bool) -> Any:
    return local


class LocalState(NamedTuple):
  """What a replica that trains alone keeps.

  Attributes:
    params: its own parameters.
    opt_state: of its own optimizer.
    steps: how many steps it has made since it last met the others.
  """

  params: Any
  opt_state: Any
  steps: int


class _Local:
  """Replicas that train alone for some steps."""

  def __init__(
    self, inner: optax.GradientTransformation, communication_period: int
  ):
    if type(communication_period) is not int or communication_period < 1:
      raise ValueError(
        "communication_period must be a positive integer, got "
        f"{communication_period!r}."
      )
    self._period = communication_period
    self._init = inner.init
    self._update = _applied_by(inner)

  def local(self, shared: SharedState) -> LocalState:
    return LocalState(shared.params, self._init(shared.params), 0)

  def params(self, shared: SharedState, local: LocalState) -> Any:
    return local.params

  def contribute(
    self, shared: SharedState, local: LocalState, grads: Any
  ) -> tuple[Any, LocalState]:
    if local.steps < self._period:
      own = SharedState(local.params, local.opt_state)
      after = self._update(own, grads)
      local = LocalState(after.params, after.opt_state, local.steps + 1)
    if local.steps < self._period:
      return None, local
    return self._payload(shared, local), local

  def _payload(self, shared: SharedState, local: LocalState) -> Any:
    raise NotImplementedError


class ElasticAverage(_Local):
  """Elastic averaging: replica and center pull at each other.

  Source: Zhang, Choromanska and LeCun 2015, Deep learning with Elastic
  Averaging SGD, algorithm 1.
  """

  name = "elastic_average"

  def __init__(
    self,
    inner: optax.GradientTransformation,
    total_num_replicas: int,
    *,
    moving_rate: float,
    communication_period: int = 10,
    synchronous: bool = False,
  ):
    super().__init__(inner, communication_period)
    if not 0.0 < moving_rate < 1.0:
      raise ValueError(
        f"moving_rate must be between 0 and 1, got {moving_rate!r}."
      )
    n = total_num_replicas
    self.quorum = Quorum(
      n if synchronous else 1, n, 0 if synchronous else _ANY_STALENESS
    )

    def exchange(params: Any, center: Any, pulls: Any) -> Any:
      total = lambda leaves: [
        leaf * jnp.asarray(pulls, leaf.dtype) for leaf in leaves
      ]
      return elastic_exchange(params, center, moving_rate, total)

    def apply(
      shared: SharedState, mean: Any, members: Any = None
    ) -> SharedState:
      mean = _owned(mean, shared.params)
      everyone = n if synchronous else 1
      pulls = everyone if members is None else members
      center = exchange(mean, shared.params, pulls).center
      return SharedState(center, shared.opt_state)

    self.sums, self.alone = synchronous, not synchronous

    self.apply = jax.jit(apply)
    self._pull = jax.jit(lambda own, center: exchange(own, center, 1).params)

  def shared(self, params: Any) -> SharedState:
    return SharedState(params, ())

  def _payload(self, shared: SharedState, local: LocalState) -> Any:
    return local.params

  def settle(
    self, before: SharedState, after: Any, local: LocalState, mine: bool
  ) -> LocalState:
    if not mine:
      return local
    params = self._pull(local.params, before.params)
    return LocalState(params, local.opt_state, 0)


class LocalUpdates(_Local):
  """Local steps; an outer optimizer applies the replicas' mean change.

  Source: Douillard et al. 2023, DiLoCo; McMahan et al. 2017, FedAvg.
  """

  name = "local_updates"
  sums = alone = False

  def __init__(
    self,
    inner: optax.GradientTransformation,
    quorum: Quorum,
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
    self.apply = _applied_by(outer)
    self._change = jax.jit(
      lambda old, new: jax.tree.map(lambda a, b: a - b, old, new)
    )

  def shared(self, params: Any) -> SharedState:
    return SharedState(params, self._init_outer(params))

  def _payload(self, shared: SharedState, local: LocalState) -> Any:
    return self._change(shared.params, local.params)

  def settle(
    self, before: Any, after: SharedState, local: LocalState, mine: bool
  ) -> LocalState:
    # Whoever was late begins again from where the others are.
    return LocalState(after.params, local.opt_state, 0)


def _owned(mean: Any, params: Any) -> Any:
  """The mean as numbers of the parameters' dtypes, in memory of their own.

  It arrives in memory of the exchange. Were a leaf handed through as it is
  (say, kept in an optimizer's state), it would change with the next step.
  """

  def one(x: jax.Array, p: jax.Array) -> jax.Array:
    if x.dtype == jnp.uint16 and p.dtype != jnp.uint16:
      wide = x.astype(jnp.uint32) << jnp.uint32(16)
      x = jax.lax.bitcast_convert_type(wide, jnp.float32)
    return jnp.copy(x).astype(p.dtype)

  return jax.tree.map(one, mean, params)


Factory = Callable[[optax.GradientTransformation, Quorum], Policy]


def elastic_average(
  *,
  moving_rate: float,
  communication_period: int = 10,
  synchronous: bool = False,
) -> Factory:
  """Elastic averaging, as the `policy` of `join` and `run_embedded`.

  Every `communication_period` steps a replica exchanges with the center:
  ``diff = params - center; params -= moving_rate * diff; center +=
  moving_rate * diff``, the exchanges of several replicas one at a time.

  Args:
    moving_rate: how far both move, between 0 and 1; with `synchronous` at most
      1 / number of replicas is sound.
    communication_period: steps from one exchange to the next.
    synchronous: whether all replicas exchange at the same time; otherwise each
      does so on its own clock.

  Raises:
    ValueError: an argument is out of range (told by `join`).

  Source: Zhang, Choromanska and LeCun 2015, Deep learning with Elastic
  Averaging SGD; `tf.contrib.opt.ElasticAverageOptimizer`.
  """
  return lambda opt, quorum: ElasticAverage(
    opt,
    quorum.total_num_replicas,
    moving_rate=moving_rate,
    communication_period=communication_period,
    synchronous=synchronous,
  )


def local_updates(
  outer_optimizer: optax.GradientTransformation | None = None,
  *,
  communication_period: int = 10,
) -> Factory:
  """Local updates, as the `policy` of `join` and `run_embedded`.

  A replica makes `communication_period` steps with the optimizer alone; then
  the outer optimizer is given the mean of ``center - params`` over
  `replicas_to_aggregate` replicas, and all go on from the new center.

  Args:
    outer_optimizer: for the center; by default SGD with a rate of 1, which
      makes the center the mean of the replicas.
    communication_period: steps from one round to the next.

  Source: McMahan et al. 2017, FedAvg; Douillard et al. 2023, DiLoCo.
  """
  return lambda opt, quorum: LocalUpdates(
    opt,
    quorum,
    outer_optimizer=outer_optimizer,
    communication_period=communication_period,
  )
