"""Synchronous updates: a step uses the fresh gradients of k of N replicas."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist import quorum
from optax_dist._internal import (
  axes,
  checks,
  gradient_sum,
  provenance,
  replica_params,
)
from optax_dist._internal import extra_args as arguments
from optax_dist._internal.indexed_slices import (
  IndexedSlices,
  has_slices,
  is_indexed_slices,
)
from optax_dist._internal.inner import check_used, checked
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.placement.replica_blocks import PerReplica
from optax_dist._internal.replicas import Replica, Replicas
from optax_dist.transforms.params_ema import params_ema

_NAME = "sync_replicas"
_ARGUMENTS = ("arrived", "local_step")
# The number of all replicas' gradients travels as float32, exact up to here.
_MAX_COUNT = 2**24
# The counters of gradients that fail a check, in the order of the checks.
_COUNTERS = ("absent", "dropped_stale", "dropped_nonfinite", "dropped_overflow")
_SCATTERED = (
  "so no replica has a gradient of its own to add up. Use cross_shard(...,"
  " param_specs=...) for it (optax.partition)."
)
_DENSE = (
  "`all_arrive` is for dense gradients: it drops none, so one with more rows than"
  " free slots would be lost without being counted. Leave it out for others, or use"
  " cross_shard for them."
)


class SyncReplica(NamedTuple):
  """State of one replica of :func:`sync_replicas`.

  Attributes:
    gradient_sum: the sum of the gradients accepted since the last step.
    num_accumulated: the number of these gradients (int32 scalar).
    local_step: the global step of the replica's last token (int32 scalar): the
      step of the parameters that its gradients belong to.
    accepted: gradients accepted so far (int32 scalar).
    absent: iterations without a gradient so far (int32 scalar).
    dropped_stale: gradients dropped as stale so far (int32 scalar).
    dropped_nonfinite: gradients dropped as non-finite so far (int32 scalar).
    dropped_overflow: gradients dropped so far because a sparse one had more
      rows than free slots (int32 scalar).
    dropped_departed: gradients lost with a removed replica (int32 scalar), see
      :func:`optax_dist.states.resize_replicas`.
  """

  gradient_sum: Any
  num_accumulated: jax.Array
  local_step: jax.Array
  accepted: jax.Array
  absent: jax.Array
  dropped_stale: jax.Array
  dropped_nonfinite: jax.Array
  dropped_overflow: jax.Array
  dropped_departed: jax.Array


class SyncReplicasState(NamedTuple):
  """State of :func:`sync_replicas`.

  Attributes:
    global_step: steps taken so far (int32 scalar, equal on all replicas).
    at_most: gradients since the last step if every replica had arrived on every
      iteration (int32 scalar, equal on all).
    inner_state: state of the inner transformation, equal on all replicas; with
      ``variable_averages`` a tuple of it and a
      :class:`~optax_dist.transforms.params_ema.ParamsEmaState`.
    replica: one :class:`SyncReplica` per replica.
  """

  global_step: jax.Array
  at_most: jax.Array
  inner_state: Any
  replica: PerReplica


def sync_replicas(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  replicas_to_aggregate: int,
  total_num_replicas: int | None = None,
  max_staleness: int | None = 0,
  staleness_weight: Literal["inverse"] | Callable[[Any], Any] | None = None,
  variable_averages: float | None = None,
  variables_to_average: Any = None,
  num_updates: bool = False,
  reject_nonfinite: bool = True,
  all_arrive: bool = False,
  accumulator_dtype: Any = None,
  averages_dtype: Any = None,
  sparse_capacity: Any = None,
  sparse_average: Literal["touched", "gradients"] = "touched",
  model_axes: axes.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Applies ``inner`` once the replicas have submitted enough fresh gradients.

  All replicas call ``update`` in lockstep, an *iteration*. ``update(updates, state,
  params, *, arrived=None, local_step=None)`` does this on each replica:

  1. The replica's gradient counts if the replica has ``arrived`` (a boolean,
     one per replica; False if it is still computing or out of data), if every
     element is finite, and if its ``local_step`` (int32, one per replica; by
     default the state's) is at least ``global_step - max_staleness``. Otherwise
     it is dropped as a whole, and counted by reason.
  2. Accepted gradients are summed on their replica, without communication.
  3. When at least ``replicas_to_aggregate`` gradients are accumulated, on all
     replicas together, ``inner`` gets the mean of *all* of them,
     ``global_step`` is incremented, and the sums are cleared. Otherwise the
     updates are zero and the inner state is unchanged.
  4. Each replica that arrived takes a token: its local step becomes the global
     step. The others keep theirs, and are stale when they arrive.

  With ``replicas_to_aggregate`` equal to the number of replicas this is
  ``pmean`` followed by ``inner``. With fewer, the others are backup replicas
  that hide stragglers. With more, each replica sums several batches; iterations on
  which there can't be enough gradients yet communicate nothing.

  Take gradients with respect to :func:`optax_dist.local_params`: one that
  ``jax.grad`` has already summed over the replicas can't be split again. Pass
  the state in and out of the map with :func:`optax_dist.states.state_specs` (or
  :func:`optax_dist.states.state_axes`): some of it is per replica.

  Args:
    inner: the transformation that gets the mean gradient.
    axis_name: the axis, or a sequence of axes, over the replicas.
    replicas_to_aggregate: how many gradients a step takes; a positive integer.
    total_num_replicas: the number of replicas; None for the size of the axis.
      It is required if ``init`` is called outside of the map.
    max_staleness: the largest staleness of an accepted gradient, in steps; None
      for no limit.
    staleness_weight: the weight of an accepted gradient: None for 1,
      ``"inverse"`` for 1 / max(1, staleness) (staleness-aware SGD), or a
      function of the staleness (an int32 scalar). The sum of the weighted
      gradients is divided by their number, not by the sum of the weights.
    variable_averages: the decay of moving averages of the parameters, which move
      at each step; None for no averages. This adds ``params_ema(decay)`` to
      ``inner``: see :func:`optax_dist.params_ema`.
    variables_to_average: its argument ``mask``, which parameters are averaged.
    num_updates: its argument ``num_updates``, for a decay that starts smaller.
    reject_nonfinite: whether gradients with an infinite or NaN element are
      dropped. If not, as in TensorFlow, one of them makes the mean non-finite.
      Finite ones are added up before they are divided, as by ``jax.lax.pmean``: a
      sum beyond the largest number of its dtype overflows.
    all_arrive: whether every replica's gradient counts on every iteration, whatever
      its values. Then no count is communicated and nothing is checked, and with
      ``replicas_to_aggregate`` up to the number of replicas no sum is kept:
      ``update`` is a mean followed by ``inner``. Not for sparse gradients, and
      without ``staleness_weight``, since no gradient is late.
    accumulator_dtype: dtype of the sums, and of the communication; None for
      each parameter's own, or float32 if that is narrower.
    averages_dtype: its argument ``dtype``; None as above.
    sparse_capacity: for parameters with sparse gradients
      (:class:`IndexedSlices`), the maximum number of rows that a replica can
      hold until the next step: a pytree like ``params``, or a function of them
      that returns one, with an integer for each such parameter and None for the
      others.
    sparse_average: whether each row of a sparse gradient is divided by the number
      of gradients that ``"touched"`` it, as in TensorFlow, or by the number of
      all ``"gradients"`` in the step.
    model_axes: further axes over which each gradient is sharded, as in tensor
      parallelism: either all shards of a replica's gradient are dropped or
      none. Under ``check_vma=True`` the types show them; otherwise, if the mesh
      has further axes, they are required: ``()`` for none.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`SyncReplicasState`. Further keyword arguments of ``update`` are
    passed to ``inner``, which all replicas share. So what optax names is averaged:
    ``value`` and ``grad``, and the results of ``value_fn``, ``obj_fn`` and
    ``grad_fn``, over the replicas whose gradient counts on the iteration of the step.
    Others must be equal on all replicas. This is checked where JAX shows it: with
    ``check_vma=True`` and under ``vmap``, not under ``pmap`` or with
    ``check_vma=False``.

  Raises:
    ValueError, TypeError: at construction, if an argument is invalid; in
      ``init``, if the number of replicas is unknown, or not that of the axis;
      in ``update``, if the axis has another size, a gradient arrives already
      summed, or the state was not passed as one replica's.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    Two of three replicas suffice for a step; the third is late, then stale.

    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(1.0), "data", replicas_to_aggregate=2, total_num_replicas=3
    ... )
    >>> state = tx.init(0.0)
    >>> axes = optax_dist.states.state_axes(state)
    >>> def step(state, gradient, arrived):
    ...   return tx.update(gradient, state, 0.0, arrived=arrived)
    >>> step = jax.vmap(
    ...   step, in_axes=(axes, 0, 0), out_axes=(0, axes), axis_name="data"
    ... )
    >>> gradients = jnp.array([1.0, 3.0, 100.0])
    >>> updates, state = step(state, gradients, jnp.array([True, True, False]))
    >>> updates
    Array([-2., -2., -2.], dtype=float32)
    >>> updates, state = step(state, gradients, jnp.array([False, False, True]))
    >>> updates, optax_dist.sync_report(state).dropped["stale"]
    (Array([0., 0., 0.], dtype=float32), array([0, 0, 1], dtype=int32))

  References:
    TensorFlow 1, `tf.compat.v1.train.SyncReplicasOptimizer
    <https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/SyncReplicasOptimizer>`_;
    Chen et al. 2016, `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_; Zhang et al. 2016, `Staleness-aware
    Async-SGD <https://arxiv.org/abs/1511.05950>`_.
  """
  needed, total_num_replicas, bound = quorum.check_sync_arguments(
    replicas_to_aggregate, total_num_replicas, max_staleness
  )
  checks.at_most("replicas_to_aggregate", needed, _MAX_COUNT)
  checks.flag("reject_nonfinite", reject_nonfinite)
  checks.one_of("sparse_average", sparse_average, ("touched", "gradients"))
  precision.check_dtype("accumulator_dtype", accumulator_dtype)
  weight_of = _weight_function(staleness_weight)
  _check_all_arrive(all_arrive, weight_of, sparse_capacity)
  replicas = Replicas.of(
    _NAME, axis_name, total_num_replicas, model_axes, "total_num_replicas"
  )
  inner = _with_averages(
    inner, variable_averages, variables_to_average, num_updates, averages_dtype
  )
  rule = _Rule(
    replicas=replicas,
    inner=provenance.given_equal(
      checked(_NAME, inner, replicas.names, known=None), replicas.names
    ),
    needed=needed,
    max_staleness=bound,
    weight_of=weight_of,
    reject_nonfinite=reject_nonfinite,
    all_arrive=all_arrive,
    dtype=accumulator_dtype,
    sparse_capacity=sparse_capacity,
    sparse_average=sparse_average,
  )
  return optax.GradientTransformationExtraArgs(rule.init, rule.update)


@dataclasses.dataclass(frozen=True)
class _Rule:
  """The rule of :func:`sync_replicas`, whose arguments are its attributes."""

  replicas: Replicas
  inner: optax.GradientTransformationExtraArgs
  needed: int
  max_staleness: int
  weight_of: Callable[[Any], Any] | None
  reject_nonfinite: bool
  all_arrive: bool
  dtype: Any
  sparse_capacity: Any
  sparse_average: str

  def init(self, params: optax.Params) -> SyncReplicasState:
    size = self.replicas.at_init()
    params = replica_params.strong(params)
    total = None
    if not self.all_arrive or self.needed > size:
      total = gradient_sum.init(params, self.sparse_capacity, self.dtype)
    # Separate arrays: one that is in a state twice can't be donated.
    zero = lambda: jnp.zeros([], jnp.int32)
    own = SyncReplica(total, *(zero() for _ in SyncReplica._fields[1:]))
    return SyncReplicasState(
      global_step=zero(),
      at_most=zero(),
      inner_state=self.inner.init(params),
      replica=self.replicas.start(own, size),
    )

  def update(
    self,
    updates: optax.Updates,
    state: SyncReplicasState,
    params: optax.Params | None = None,
    *,
    arrived: Any = None,
    local_step: Any = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SyncReplicasState]:
    me = self.replicas.validate_and_enter(state.replica, state.at_most)
    self._check_update(me, updates, params, arrived, local_step)
    args = updates, state.inner_state, params
    check_used(_NAME, self.inner.update, args, extra_args, _ARGUMENTS)
    arguments.check_equal(_NAME, self.replicas.names, extra_args)
    arrived = _scalar(arrived, True, "arrived", jnp.bool_)
    token = _scalar(local_step, me.own.local_step, "local_step", jnp.integer)

    # The replica's sum and count, with its gradient if that counts.
    late = state.global_step - token
    here, own = self._accumulate(me, updates, arrived, late)
    at_most = state.at_most + me.size

    # A step with the mean of all replicas' gradients, if there are enough.
    def aggregate() -> tuple[Any, ...]:
      mean, enough = self._mean(own, at_most, updates)
      counts = None if self.all_arrive else here
      shared = arguments.of_all(self.replicas.names, extra_args, counts)
      step = lambda: self._step(mean, state.inner_state, params, kept, shared)
      # A branch changes just the rows of a table that have a gradient.
      return _cond(enough, step, no_step, fuse=not has_slices(updates))

    # Nothing is communicated while there can't be enough, which all agree on.
    possible = self.needed <= me.size or at_most >= self.needed
    kept = None if me.own.gradient_sum is None else own.gradient_sum
    no_step = state.inner_state, kept, jnp.asarray(False)
    new_updates, inner_state, left, stepped = _cond(
      possible, aggregate, no_step
    )

    # A replica that arrived takes a token for the next step.
    global_step = state.global_step + stepped.astype(jnp.int32)
    own = own._replace(
      gradient_sum=left,
      num_accumulated=jnp.where(stepped, 0, own.num_accumulated),
      local_step=jnp.where(arrived, global_step, me.own.local_step),
    )
    at_most = jnp.where(stepped, 0, at_most)
    return new_updates, SyncReplicasState(
      global_step, at_most, inner_state, me.as_state(own)
    )

  def _accumulate(
    self, me: Replica, gradient: Any, arrived: jax.Array, late: jax.Array
  ) -> tuple[jax.Array, SyncReplica]:
    """Adds a gradient up if it counts; returns whether it does, and the state."""
    before = me.own.gradient_sum
    weight = None if self.weight_of is None else self.weight_of(late)
    added, fits = gradient_sum.add(before, gradient, weight, self.dtype)
    yes = jnp.asarray(True)
    checks = yes, yes, yes, yes
    if not self.all_arrive:
      checks = (
        arrived,
        # As in TensorFlow, and unlike the coordinator, which distinguishes replicas
        # of different runs: a future step counts as fresh.
        late <= self.max_staleness,
        me.all_finite(gradient) if self.reject_nonfinite else yes,
        yes if fits is True else me.agree(fits, gradient),
      )
    here, own = _counted(me.own, checks)
    return here, own._replace(
      gradient_sum=added if self.all_arrive else _where(here, added, before),
      num_accumulated=own.num_accumulated + here.astype(jnp.int32),
    )

  def _mean(
    self, own: SyncReplica, at_most: jax.Array, like: Any
  ) -> tuple[Any, Any]:
    """The mean of all replicas' gradients, and whether there are enough of them."""
    total, names = own.gradient_sum, self.replicas.names
    if self.all_arrive:
      sums, _ = gradient_sum.reduce(total, None, like, names)
      return gradient_sum.divide(sums, like, at_most), True
    sums, all_in = gradient_sum.reduce(total, own.num_accumulated, like, names)
    mean = gradient_sum.divide(sums, like, all_in, self.sparse_average)
    return mean, all_in >= self.needed

  def _step(
    self, mean: Any, inner_state: Any, params: Any, kept: Any, extra_args: Any
  ) -> tuple[Any, ...]:
    """The updates and the new state of a step, with empty sums."""
    updates, new = self.inner.update(mean, inner_state, params, **extra_args)
    arguments.check_state(_NAME, self.replicas.names, inner_state, new)
    return updates, new, gradient_sum.empty(kept), jnp.asarray(True)

  def _check_update(
    self,
    me: Replica,
    updates: Any,
    params: Any,
    arrived: Any,
    local_step: Any,
  ) -> None:
    """Checks a gradient, and the arguments `arrived` and `local_step`."""
    # With no parameters at all, updates and sum may both be None.
    accumulates = me.own.gradient_sum is not None or updates is None
    if self.all_arrive and not (arrived is None and local_step is None):
      raise ValueError(
        f"{_NAME}: with `all_arrive` neither `arrived` nor `local_step` may be"
        " given to update."
      )
    if self.all_arrive and has_slices(updates):
      raise ValueError(f"{_NAME}: {_DENSE}")
    if self.needed > me.size and not accumulates:
      raise ValueError(
        f"{_NAME}: {self.needed} gradients of {me.size} replicas need a sum, and"
        " this state holds none: it was made where every iteration was a step. Take"
        " a new one from init, with the global_step and inner_state of the old."
      )
    update_leaves.check_gradients(
      _NAME, updates, self.replicas.names, _SCATTERED
    )
    if params is not None:
      update_leaves.check_like(_NAME, updates, params)
    if accumulates:
      gradient_sum.check(updates, me.own.gradient_sum)


def _check_all_arrive(
  all_arrive: bool, weight_of: Any, sparse_capacity: Any
) -> None:
  """Checks ``all_arrive``, and that no other argument contradicts it."""
  checks.flag("all_arrive", all_arrive)
  if all_arrive and sparse_capacity is not None:
    raise ValueError(f"{_NAME}: {_DENSE}")
  if all_arrive and weight_of is not None:
    raise ValueError(
      f"{_NAME}: `all_arrive` has no late gradients, which `staleness_weight` is"
      " for."
    )


def _with_averages(
  inner: optax.GradientTransformation,
  decay: float | None,
  mask: Any,
  num_updates: bool,
  dtype: Any,
) -> optax.GradientTransformation:
  """Adds moving averages of the parameters to ``inner``, if there is a decay.

  Raises:
    ValueError: if an argument is invalid, or only of use with a decay.
  """
  checks.transformation("inner", inner)
  checks.flag("num_updates", num_updates)
  precision.check_dtype("averages_dtype", dtype)
  if decay is None:
    optional = {
      "variables_to_average": mask is not None,
      "num_updates": num_updates,
    }
    for name in (name for name, is_given in optional.items() if is_given):
      raise ValueError(
        f"{_NAME}: `{name}` needs `variable_averages`, the decay, got None."
      )
    return inner
  checks.fraction("variable_averages", decay, "a decay ")
  ema = params_ema(decay, num_updates=num_updates, mask=mask, dtype=dtype)
  return optax.chain(inner, ema)


def _counted(
  own: SyncReplica, checks: tuple[jax.Array, ...]
) -> tuple[jax.Array, SyncReplica]:
  """Counts a gradient: as accepted, or by the first check that it fails.

  Args:
    own: the replica's state.
    checks: the results of the checks, boolean scalars, in the order of ``_COUNTERS``.

  Returns:
    Whether it is accepted, and the state.
  """
  here, counts = jnp.asarray(True), {}
  for name, holds in zip(_COUNTERS, checks, strict=True):
    counts[name] = getattr(own, name) + (here & ~holds).astype(jnp.int32)
    here &= holds
  counts["accepted"] = own.accepted + here.astype(jnp.int32)
  return here, own._replace(**counts)


def _weight_function(weight: Any) -> Callable[[Any], Any] | None:
  """Returns the weight of a gradient as a function of its staleness.

  Args:
    weight: None for 1, ``"inverse"`` for 1 / max(1, staleness), or a function.

  Returns:
    A function of an int32 array; None if every weight is 1.

  Raises:
    ValueError: if ``weight`` is something else.

  Example:
    >>> _weight_function("inverse")(jnp.array([0, 1, 4]))
    Array([1.  , 1.  , 0.25], dtype=float32)

  References:
    Zhang et al. 2016, `Staleness-aware Async-SGD
    <https://arxiv.org/abs/1511.05950>`_.
  """
  if weight is None or callable(weight):
    return weight
  if not isinstance(weight, str) or weight != "inverse":
    raise ValueError(
      "`staleness_weight` must be None, 'inverse' or a function of the staleness,"
      f" got {weight!r:.100}."
    )
  return lambda late: 1.0 / jnp.maximum(late, 1).astype(jnp.float32)


def _cond(
  yes: Any, new: Callable[[], Any], old: tuple[Any, ...], fuse: bool = False
) -> Any:
  """Returns ``new()`` if ``yes``, and otherwise updates of zero and the ``old`` state.

  Args:
    yes: a boolean scalar, equal on all replicas; or the Python value True.
    new: returns updates, and a new state.
    old: the old state.
    fuse: whether to choose each element, which the compiler fuses with what is
      around it, instead of branching. Then ``new`` is computed anyway.
  """
  if yes is True:
    return new()
  if fuse:
    result = new()
    return _where(yes, result, (_zeros_like_updates(result[0]), *old))
  types = jax.eval_shape(new)
  return axes.when(yes, new, lambda: (_zeros_like_updates(types[0]), *old))


def _where(yes: jax.Array, new: Any, old: Any) -> Any:
  """Chooses by ``jnp.where``, so that NaN in the other value does no harm."""
  choose = lambda x, y: jnp.where(yes, axes.with_dtype(x, y.dtype), y)
  return jax.tree.map(choose, new, old)


def _scalar(value: Any, default: Any, name: str, kind: Any) -> jax.Array:
  value = jnp.asarray(default if value is None else value)
  if value.shape not in ((), (1,)) or not jnp.issubdtype(value.dtype, kind):
    raise ValueError(
      f"{_NAME}: `{name}` must be a scalar of each replica, of kind"
      f" {kind.__name__}, got shape {value.shape} and dtype {value.dtype}."
    )
  value = value.reshape(())
  return value if kind is jnp.bool_ else value.astype(jnp.int32)


def _zeros_like_updates(updates: Any) -> Any:
  """Returns zeros with the structure of updates, or of their types."""

  def zeros(x: Any) -> Any:
    if isinstance(x, IndexedSlices):
      indices = jnp.full(x.indices.shape, x.dense_shape[0], x.indices.dtype)
      values = jnp.zeros(x.values.shape, x.values.dtype)
      return IndexedSlices.unchecked(values, indices, x.dense_shape)
    return axes.zeros(
      x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    )

  return jax.tree.map(zeros, updates, is_leaf=is_indexed_slices)
