"""Synchronous updates: a step uses the fresh gradients of k of N replicas."""

import functools
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
  moving_averages,
  provenance,
  replica_params,
  staleness,
)
from optax_dist._internal.extra_args import check_used
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.leaves.choose import choose
from optax_dist._internal.leaves.horizontal_fusion import fuse_leaves
from optax_dist._internal.leaves.in_place import change_if
from optax_dist._internal.leaves.keep_unless import keep_unless
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.packing import is_large, is_small
from optax_dist._internal.leaves.scalars import in_one_kernel
from optax_dist._internal.replica_blocks import PerReplica
from optax_dist._internal.replica_params import Replica, Replicas
from optax_dist._internal.steady_state import with_steady_state
from optax_dist.sparse.indexed_slices import (
  IndexedSlices,
  is_indexed_slices,
  values_of,
)

_USER = "sync_replicas"
_ARGUMENTS = ("arrived", "local_step")
# Gradients of all replicas together are counted in int32.
_MOST = 2**30
_SCATTERED = (
  "so no replica has a gradient of its own to add up. Use cross_shard(...,"
  " param_specs=...) for it (optax.partition)."
)


class SyncReplica(NamedTuple):
  """State of one replica of :func:`sync_replicas`.

  Attributes:
    gradient_sum: the sum of the gradients accepted since the last step; without
      any, it is a meaningless leftover of the last step.
    num_accumulated: the number of these gradients (int32 scalar).
    local_step: the global step of the replica's last token (int32 scalar): the
      step of the parameters that its gradients belong to.
    accepted: gradients accepted so far (int32 scalar).
    absent: ticks without a gradient so far (int32 scalar).
    dropped_stale: gradients dropped as stale so far (int32 scalar).
    dropped_nonfinite: gradients dropped as non-finite so far (int32 scalar).
    dropped_overflow: gradients dropped so far because a sparse one had more
      rows than free slots (int32 scalar).
    dropped_departed: gradients lost with a removed replica (int32 scalar), see
      :func:`optax_dist.resize_replicas`.
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
      tick (int32 scalar, equal on all).
    inner_state: state of the inner transformation, equal on all replicas.
    averages: moving averages of the parameters, or None.
    replica: one :class:`SyncReplica` per replica.
  """

  global_step: jax.Array
  at_most: jax.Array
  inner_state: Any
  averages: Any
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
  reject_nonfinite: bool = True,
  all_arrive: bool = False,
  accumulator_dtype: Any = None,
  averages_dtype: Any = None,
  sparse_capacity: Any = None,
  sparse_average: Literal["touched", "gradients"] = "touched",
  model_axes: axes.AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
  """Applies ``inner`` once the replicas have submitted enough fresh gradients.

  All replicas call ``update`` in lockstep, a *tick*. ``update(updates, state,
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
  that hide stragglers. With more, each replica sums several batches; ticks on
  which there can't be enough gradients yet communicate nothing.

  Take gradients with respect to :func:`optax_dist.local_params`: one that
  ``jax.grad`` has already summed over the replicas can't be split again. Pass
  the state in and out of the map with :func:`optax_dist.state_specs` (or
  :func:`optax_dist.state_axes`): some of it is per replica.

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
    variable_averages: the decay of a moving average of the parameters, updated
      at each step; None for no averages. Read them with
      :func:`optax_dist.averaged_params`.
    variables_to_average: which parameters are averaged: a pytree of booleans
      like ``params``, a function of ``params`` that returns one, or None for all.
    reject_nonfinite: whether gradients with an infinite or NaN element are
      dropped. If not, as in TensorFlow, one of them makes the mean non-finite.
    all_arrive: whether every replica's gradient counts on every tick, whatever
      its values. Then no count is communicated and nothing is checked, and with
      ``replicas_to_aggregate`` up to the number of replicas no sum is kept:
      ``update`` is a mean followed by ``inner``.
    accumulator_dtype: dtype of the sums, and of the communication; None for
      each parameter's own, or float32 if that is narrower.
    averages_dtype: dtype of the averages; None as above.
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
      none. Under ``check_vma=True`` the types show them; otherwise they are
      required.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`SyncReplicasState`. Further keyword arguments of ``update`` are
    passed to ``inner``.

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
    >>> axes = optax_dist.state_axes(state)
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
    replicas_to_aggregate,
    total_num_replicas,
    0 if max_staleness is None else max_staleness,
  )
  checks.at_most("replicas_to_aggregate", needed, _MOST)
  replicas = Replicas.of(
    _USER, axis_name, total_num_replicas, model_axes, "total_num_replicas"
  )
  names = replicas.names
  weight_of = staleness.weight_function(staleness_weight)
  moving_averages.check(variable_averages, variables_to_average)
  checks.flag("reject_nonfinite", reject_nonfinite)
  checks.flag("all_arrive", all_arrive)
  checks.one_of("sparse_average", sparse_average, ("touched", "gradients"))
  precision.check_dtype("accumulator_dtype", accumulator_dtype)
  precision.check_dtype("averages_dtype", averages_dtype)
  inner = provenance.given_equal(with_steady_state(inner), names)

  def init_fn(params: optax.Params) -> SyncReplicasState:
    size = replicas.at_init()
    params = replica_params.strong(params)
    total = None
    if not all_arrive or needed > size or sparse_capacity is not None:
      total = gradient_sum.init(params, sparse_capacity, accumulator_dtype)
    # Separate arrays: one that is in a state twice can't be donated.
    zero = lambda: jnp.zeros([], jnp.int32)
    own = SyncReplica(total, *(zero() for _ in SyncReplica._fields[1:]))
    return SyncReplicasState(
      global_step=zero(),
      at_most=zero(),
      inner_state=inner.init(params),
      averages=moving_averages.init(
        params, variable_averages, variables_to_average, averages_dtype
      ),
      replica=replicas.start(own, size),
    )

  def add_up(
    me: Replica,
    total: list[Any] | None,
    gradient: list[Any],
    on_time: tuple[jax.Array, jax.Array, jax.Array],
    weight: jax.Array | None = None,
  ) -> tuple[list[Any], "_Judged"]:
    """Steps 1 and 2: adds the gradient to this replica's sum if it counts."""
    yes = jnp.asarray(True)
    if total is None:
      one = jnp.asarray(1, jnp.int32)
      return gradient, _Judged(_Verdict(yes, yes, yes, yes), yes, one, one)
    # Clearing a sum when it is next used costs nothing; clearing it at the step
    # would cost another pass over memory.
    is_empty = me.own.num_accumulated == 0
    at = in_place(me, total, gradient) if weight is None else []
    # Flat, as it is sent: the compiler may compute another shape twice.
    flat = lambda x: jnp.ravel(x) if is_small(x, names) else x
    others = [None if i in at else flat(x) for i, x in enumerate(gradient)]
    before = gradient_sum.clear(list(map(flat, total)), is_empty)
    held, fits = gradient_sum.add(before, others, weight)
    number = jnp.zeros([], jnp.float32)
    if reject_nonfinite and not all_arrive:
      number = jax.lax.stop_gradient(me.finite_number(gradient))
    judged = in_one_kernel(
      judge,
      me.own.num_accumulated,
      on_time,
      number,
      yes if all_arrive else me.agree(fits, gradient),
    )
    if not all_arrive:
      # A dropped gradient may hold NaN, so it is never used in arithmetic.
      held = choose(judged.accepted, held, before)
    held = [
      jnp.reshape(x, like.shape) if is_small(like, names) else x
      for x, like in zip(held, total, strict=True)
    ]
    if not at:
      return held, judged

    def add(carry: tuple[Any, ...]) -> tuple[Any, ...]:
      xs, is_empty, zero = carry
      before = [
        jnp.where(is_empty, zero.astype(total[i].dtype), total[i]) for i in at
      ]
      held, _ = gradient_sum.add(before, xs)
      # Loop invariants are hoisted and computed every time, so this value
      # changes.
      return choose(judged.accepted, held, before), ~is_empty, -zero

    # The sum of a single gradient is that gradient, without a pass over memory.
    xs = [gradient[i].astype(total[i].dtype) for i in at]
    carry = xs, is_empty, jnp.zeros([], jnp.float32)
    xs, *_ = change_if(~(is_empty & judged.accepted), add, carry, names)
    return _put_at(held, at, xs), judged

  def judge(
    num_accumulated: jax.Array,
    on_time: tuple[jax.Array, jax.Array, jax.Array],
    number: jax.Array,
    fits: jax.Array,
  ) -> "_Judged":
    """Whether the gradient counts, and how many there are then."""
    here, global_step, local_step = on_time
    yes = jnp.asarray(True)
    # As in TensorFlow, and unlike the coordinator, which distinguishes replicas
    # of different runs: a future step counts as fresh.
    fresh = yes if max_staleness is None else global_step - local_step <= bound
    verdict = _Verdict(here, fresh, jnp.isfinite(number), fits)
    if all_arrive:
      verdict = _Verdict(yes, yes, yes, yes)
    accepted = verdict.accepted
    count = num_accumulated + accepted.astype(jnp.int32)
    return _Judged(verdict, accepted, count, count.astype(jnp.float32))

  def in_place(me: Replica, total: list[Any], gradient: list[Any]) -> list[int]:
    """The gradients large enough for a loop of at most one iteration."""
    if needed > me.size:
      return []
    return [
      i
      for i, x in enumerate(gradient)
      if is_large(total[i], names) and isinstance(x, jax.Array)
    ]

  def keep(
    me: Replica,
    total: list[Any],
    held: list[Any],
    gradient: list[Any],
    stepped: jax.Array,
  ) -> list[Any]:
    """Keeps what accumulates until a step; leaves the rest after one."""
    at = in_place(me, total, gradient) if weight_of is None else []
    if not at:
      return held
    xs, _ = me.change_if(
      ~stepped,
      lambda held, _, common: (held, common),
      [total[i] for i in at],
      (),
      read=[held[i] for i in at],
    )
    return _put_at(held, at, xs)

  def update_fn(
    updates: optax.Updates,
    state: SyncReplicasState,
    params: optax.Params | None = None,
    *,
    arrived: Any = None,
    local_step: Any = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SyncReplicasState]:
    me = replicas.enter(state.replica, state.at_most)
    own = me.own
    # None can be all parameters, of which there are none, and their sum.
    accumulates = own.gradient_sum is not None or updates is None
    check_update(me, accumulates, updates, params, arrived, local_step)
    _check_gradients(updates, names)
    if params is not None:
      update_leaves.check_like(_USER, updates, params)
    args = updates, state.inner_state, params
    check_used(_USER, inner.update, args, extra_args, _ARGUMENTS)
    here = _scalar(arrived, True, "arrived", jnp.bool_)
    step = _scalar(local_step, own.local_step, "local_step", jnp.integer)
    weight = weight_of and weight_of(state.global_step - step)
    # The maximum number of gradients: equal on all replicas, and exact if all
    # arrive.
    at_most = jnp.asarray(me.size, jnp.int32)
    if accumulates:
      at_most += state.at_most

    # Steps 1 and 2: each replica adds its gradient if it counts.
    given = updates
    if not accumulates:
      given = gradient_sum.cast(updates, dtype=accumulator_dtype)
    packed = gradient_sum.Packed.of(given, own.gradient_sum, names)
    gradient, total = packed.leaves(given), None
    if accumulates:
      total = packed.leaves(own.gradient_sum)
    on_time = here, state.global_step, step
    held, judged = add_up(me, total, gradient, on_time, weight)

    # Step 3: if there are enough gradients, aggregate once, and apply.
    def reduced() -> tuple[list[Any], jax.Array]:
      sent = packed.pack(held, None if all_arrive else judged.sent)
      total = gradient_sum.reduce(sent, packed.kinds(gradient), names)
      return total, at_most if all_arrive else packed.count(total)

    def settled(all_in: jax.Array) -> "_Settled":
      return in_one_kernel(
        functools.partial(_settle, needed),
        own._replace(gradient_sum=None),
        (state.global_step, at_most),
        judged,
        all_in,
      )

    def applied(
      total: list[Any], all_in: jax.Array, enough: Any, inverse: Any = None
    ) -> tuple[Any, Any]:
      apply: Any = functools.partial(apply_if, enough, all_in, inverse)
      sums = packed.unpack(total)
      if accumulates:
        # Selecting for each leaf costs more than the inner update itself.
        apply = fuse_leaves(apply, names, packed.joined(total, sums))
      return apply(sums, before)

    def apply_if(
      enough: Any, all_in: jax.Array, inverse: Any, total: Any, before: Any
    ) -> tuple[Any, Any]:
      def apply() -> tuple[Any, Any]:
        mean = gradient_sum.divide(
          total, updates, all_in, sparse_average, inverse
        )
        new_updates, inner_state = inner.update(
          mean, before[0], params, **extra_args
        )
        averages = moving_averages.update(
          before[1], params, new_updates, variable_averages
        )
        return new_updates, (inner_state, averages)

      if enough is None:
        return apply()
      if _has_slices(updates):
        nothing = _nothing(jax.eval_shape(apply)[0]), before
        return axes.cond(enough, apply, lambda: nothing)
      # Selecting element by element is fused with the inner update, and with
      # the caller's next operations; a conditional would prevent that.
      if not any(is_large(x, names) for x in jax.tree.leaves(before)):
        applied = apply()
        return choose(enough, applied, (_nothing(applied[0]), before))
      nothing = _nothing(jax.eval_shape(apply)[0])
      return keep_unless(enough, apply, nothing, before)

    before = state.inner_state, state.averages
    inputs = jax.tree.leaves((held, before), is_leaf=is_indexed_slices)
    if needed <= me.size or all(is_small(x, names) for x in inputs):
      if needed <= me.size:
        sums, all_in = reduced()
      else:
        nothing = jax.tree.map(axes.zeros, jax.eval_shape(reduced))
        # Equal on all replicas, so either all of them enter the collectives or
        # none.
        sums, all_in = axes.cond(at_most >= needed, reduced, lambda: nothing)
      after = settled(all_in)
      always = all_arrive and needed <= me.size
      enough = None if always else after.stepped
      if not (always or axes.is_fully_manual()):
        enough = materialize(enough)
      results = applied(sums, all_in, enough, after.inverse)
    else:

      def aggregate() -> tuple[Any, Any, jax.Array]:
        sums, all_in = reduced()
        enough = None if all_arrive else materialize(all_in >= needed)
        return *applied(sums, all_in, enough), all_in

      nothing = _nothing(jax.eval_shape(aggregate)[0])
      *results, all_in = axes.cond(
        at_most >= needed,
        aggregate,
        lambda: (nothing, before, jnp.zeros([], jnp.int32)),
      )
      after = settled(all_in)
    new_updates, (inner_state, averages) = results

    # Step 4: tokens.
    sums_kept = None
    if total is not None:
      sums_kept = packed.treedef.unflatten(
        keep(me, total, held, gradient, after.stepped)
      )
    return new_updates, SyncReplicasState(
      global_step=after.global_step,
      at_most=after.at_most,
      inner_state=inner_state,
      averages=averages,
      replica=me.leave(after.own._replace(gradient_sum=sums_kept)),
    )

  def check_update(
    me: Replica,
    accumulates: bool,
    updates: Any,
    params: Any,
    arrived: Any,
    local_step: Any,
  ) -> None:
    given = params is not None or updates is None
    if variable_averages is not None and not given:
      raise ValueError(
        f"{_USER}: `variable_averages` needs the parameters: call"
        " update(updates, state, params)."
      )
    if all_arrive and not (arrived is None and local_step is None):
      raise ValueError(
        f"{_USER}: with `all_arrive` neither `arrived` nor `local_step` may be"
        " given to update."
      )
    if needed > me.size and not accumulates:
      raise ValueError(
        f"{_USER}: {needed} gradients of {me.size} replicas need a sum, and this"
        " state holds none: it was made where every tick was a step. Take a new"
        " one from init, with the global_step, inner_state and averages of the"
        " old."
      )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Verdict(NamedTuple):
  """Whether a gradient counts, and why not: boolean scalars."""

  here: Any
  fresh: Any
  finite: Any
  fits: Any

  @property
  def accepted(self) -> jax.Array:
    return self.here & self.fresh & self.finite & self.fits

  def tally(self, own: SyncReplica) -> SyncReplica:
    """Counts the gradient, as accepted or by the first reason against it."""
    add = lambda counter, what: counter + what.astype(jnp.int32)
    timely = self.here & self.fresh
    return own._replace(
      accepted=add(own.accepted, self.accepted),
      absent=add(own.absent, ~self.here),
      dropped_stale=add(own.dropped_stale, self.here & ~self.fresh),
      dropped_nonfinite=add(own.dropped_nonfinite, timely & ~self.finite),
      dropped_overflow=add(
        own.dropped_overflow, timely & self.finite & ~self.fits
      ),
    )


class _Judged(NamedTuple):
  """Whether a gradient counts, and how many the replica then has.

  Attributes:
    verdict: why it counts or not.
    accepted: whether it does (boolean scalar).
    count: gradients accumulated since the last step (int32 scalar).
    sent: the same, in the form that is sent (float32 scalar).
  """

  verdict: _Verdict
  accepted: Any
  count: Any
  sent: Any


class _Settled(NamedTuple):
  """The result of a tick.

  Attributes:
    stepped: whether it is a step (boolean scalar).
    inverse: 1 over the gradients accumulated on all replicas, or over 1
      (float32 scalar).
    global_step: the global step after it.
    at_most: the maximum number of gradients since the last step.
    own: the replica's counters.
  """

  stepped: Any
  inverse: Any
  global_step: Any
  at_most: Any
  own: SyncReplica


def _settle(
  needed: int,
  own: SyncReplica,
  common: tuple[jax.Array, jax.Array],
  judged: _Judged,
  all_in: jax.Array,
) -> _Settled:
  """Decides whether to take a step, and updates the counters."""
  global_step, at_most = common
  stepped = all_in >= needed
  global_step += stepped.astype(jnp.int32)
  own = judged.verdict.tally(own)._replace(
    num_accumulated=jnp.where(stepped, 0, judged.count),
    local_step=jnp.where(judged.verdict.here, global_step, own.local_step),
  )
  inverse = 1 / jnp.maximum(all_in, 1).astype(jnp.float32)
  at_most = jnp.where(stepped, 0, at_most)
  return _Settled(stepped, inverse, global_step, at_most, own)


def _put_at(xs: list[Any], at: list[int], others: list[Any]) -> list[Any]:
  xs = list(xs)
  for i, x in zip(at, others, strict=True):
    xs[i] = x
  return xs


def _check_gradients(
  updates: optax.Updates, names: tuple[axes.AxisName, ...]
) -> None:
  tracked = axes.tracked_axes(names)
  known = provenance.Known()
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=is_indexed_slices
  )
  for path, leaf in leaves:
    leaf = values_of(leaf)
    update_leaves.check_dtype(_USER, path, leaf)
    update_leaves.check_own(_USER, path, leaf, tracked)
    what = f"{_USER}: {update_leaves.name_of(path)}"
    provenance.check_whole(what, leaf, names, _SCATTERED, known)


def _has_slices(updates: optax.Updates) -> bool:
  leaves = jax.tree.leaves(updates, is_leaf=is_indexed_slices)
  return any(map(is_indexed_slices, leaves))


def _scalar(value: Any, default: Any, name: str, kind: Any) -> jax.Array:
  value = jnp.asarray(default if value is None else value)
  if value.shape not in ((), (1,)) or not jnp.issubdtype(value.dtype, kind):
    raise ValueError(
      f"{_USER}: `{name}` must be a scalar of each replica, of kind"
      f" {kind.__name__}, got shape {value.shape} and dtype {value.dtype}."
    )
  value = value.reshape(())
  return value if kind is jnp.bool_ else value.astype(jnp.int32)


def _nothing(updates: Any) -> Any:
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
