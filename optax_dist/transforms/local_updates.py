"""Local updates: replicas train by themselves, and agree from time to time."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, collectives, own_params, replicas
from optax_dist._internal.in_place import change_if
from optax_dist._internal.replica_blocks import PerReplica, as_block, own_block
from optax_dist.sparse.indexed_slices import is_indexed_slices
from optax_dist.transforms.schedules import SettablePeriod

_USER = "local_updates"
_INNER_STATES = ("local", "averaged")


class LocalReplica(NamedTuple):
  """What one replica of :func:`local_updates` holds.

  Attributes:
    local_step: steps that the replica has made (int32 scalar).
    inner_state: state of the inner transformation.
  """

  local_step: jax.Array
  inner_state: Any


class LocalUpdatesState(NamedTuple):
  """State of :func:`local_updates`.

  Attributes:
    global_step: rounds made so far (int32 scalar, equal on all replicas).
    ticks: steps since the last round ended (int32 scalar, equal on all).
    round_start: steps made before this round (int32 scalar, equal on all).
    period: steps of this round (int32 scalar, equal on all).
    center: the parameters that this round started from, equal on all. See
      :func:`optax_dist.center_params`.
    outer_state: state of the outer transformation, equal on all.
    replica: one :class:`LocalReplica` per replica.
  """

  global_step: jax.Array
  ticks: jax.Array
  round_start: jax.Array
  period: jax.Array
  center: Any
  outer_state: Any
  replica: PerReplica


def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: int | Callable[[jax.Array], Any] | SettablePeriod,
  num_replicas: int | None = None,
  inner_state: Literal["local", "averaged"] = "local",
) -> optax.GradientTransformationExtraArgs:
  """Lets each replica make steps of its own, then steps with their mean.

  All replicas call ``update`` in lock step, each with its own parameters and its
  own gradient. In each round:

  1. Each replica makes ``communication_period`` steps with ``inner``, from the
     round's common start.
  2. ``outer`` takes ``start - mean of the replicas' parameters`` as a gradient,
     and moves the start by it. This mean is the only communication.
  3. All replicas go on from there.

  With ``outer=optax.sgd(1.0)`` this is local SGD (federated averaging); other
  choices are DiLoCo, SlowMo and BMUF: see :mod:`optax_dist.transforms.presets`.

  The parameters are the replicas' own: give them a leading replica axis outside
  of the map, and shard it. Some of the state belongs to one replica too; carry it
  in and out of the map with :func:`optax_dist.state_specs` (or
  :func:`optax_dist.state_axes`).

  The new start is equal on all replicas to the bit, and kept in the state:
  :func:`optax_dist.center_params`. Each replica's parameters get there by an
  addition, ``params + (start - params)``, which may differ from it in the last
  bits of the greater of the two. As every round is measured from the start in the
  state, such differences do not add up; :func:`optax_dist.reset_to_center` removes
  them.

  Args:
    inner: the transformation that updates each replica's parameters.
    outer: the transformation that updates their common start, equal on all
      replicas. It gets no keyword arguments.
    axis_name: the axis, or a sequence of axes, that the replicas lie along.
    communication_period: steps in a round: a positive integer, or a schedule,
      called with the steps made so far (int32 scalar) when a round begins, whose
      result counts as 1 where it is less, or a :class:`SettablePeriod`. See
      :mod:`optax_dist.transforms.schedules`.
    num_replicas: the number of replicas; None for the size of the axis. It must be
      given where ``init`` is called outside of the map and of ``jax.set_mesh``.
    inner_state: whether the floating-point arrays of the inner state stay
      ``"local"`` or are ``"averaged"`` over the replicas with the parameters. The
      others, such as counters, stay local.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`LocalUpdatesState`. Keyword arguments of ``update`` go to ``inner``.
    ``init`` takes the parameters without a replica axis. Outside of the map all
    replicas start from them; inside, the center is the first replica's, and the
    others join it when the first round ends. A parameter whose gradient is None
    takes no part.

  Raises:
    ValueError: at construction, if an argument is not as above; in ``init``, if
      the number of replicas is not known; in ``update``, if the axis has another
      size, there are no parameters, or by their type they are not each replica's
      own, or the state was not passed as one replica's.
    TypeError: in ``update``, if an update is not floating-point or complex.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.local_updates(
    ...   optax.sgd(1.0), optax.sgd(0.5), "data", num_replicas=2,
    ...   communication_period=1,
    ... )
    >>> state = tx.init(jnp.zeros(()))
    >>> axes = optax_dist.state_axes(state)
    >>> def step(params, state, gradient):
    ...   updates, state = tx.update(gradient, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> step = jax.vmap(
    ...   step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"
    ... )
    >>> params, state = step(jnp.zeros(2), state, jnp.array([-4.0, -8.0]))
    >>> params
    Array([3., 3.], dtype=float32)

  References:
    Stich 2018, `Local SGD Converges Fast and Communicates Little
    <https://arxiv.org/abs/1805.09767>`_; Douillard et al. 2023, `DiLoCo
    <https://arxiv.org/abs/2311.08105>`_; Wang et al. 2019, `SlowMo
    <https://arxiv.org/abs/1910.00643>`_.
  """
  names = axes.canonical_names(axis_name)
  own_params.check_count("num_replicas", num_replicas, or_none=True)
  first = communication_period
  if isinstance(first, SettablePeriod):
    first = first.initial
  if not callable(first):
    own_params.check_count("communication_period", first)
  if inner_state not in _INNER_STATES:
    accepted = ", ".join(map(repr, _INNER_STATES))
    raise ValueError(
      f"`inner_state` must be one of {accepted}, got {inner_state!r}."
    )
  inner = optax.with_extra_args_support(inner)
  averages = inner_state == "averaged"

  def period_after(step, last=None):
    if isinstance(communication_period, SettablePeriod):
      return jnp.asarray(first, jnp.int32) if last is None else last
    if not callable(communication_period):
      return jnp.asarray(communication_period, jnp.int32)
    return jnp.maximum(
      jnp.asarray(communication_period(step)).astype(jnp.int32), 1
    )

  def init_fn(params):
    size = replicas.at_init(_USER, names, num_replicas)
    # Not weakly typed: types must not change in the first update.
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    center = own_params.common(params, names)
    # One array each, so that the state can be donated.
    zero = lambda: jnp.zeros([], jnp.int32)
    return LocalUpdatesState(
      global_step=zero(),
      ticks=zero(),
      round_start=zero(),
      period=period_after(zero()),
      center=center,
      outer_state=outer.init(center),
      replica=replicas.start(
        LocalReplica(zero(), inner.init(params)), size, names
      ),
    )

  def update_fn(updates, state, params=None, **extra_args):
    size = replicas.in_update(_USER, names, num_replicas)
    replicas.check_counter(_USER, state.ticks, names)
    xs, gradients, treedef = own_params.flatten_with_updates(
      _USER, params, updates, names
    )
    own_params.flatten_center(_USER, params, state.center)
    own, leading = own_block(
      state.replica, state.replica.value.local_step, _USER
    )
    moves = [i for i, g in enumerate(gradients) if g is not None]

    # 1. A step of this replica.
    steps, new_inner_state = inner.update(
      updates, own.inner_state, params, **extra_args
    )
    steps = treedef.flatten_up_to(steps)
    for i in moves:
      steps[i] = (
        steps[i].to_dense() if is_indexed_slices(steps[i]) else steps[i]
      )

    ticks = state.ticks + 1
    round_end = state.round_start + ticks
    # Under shard_map, parameters are blocks with a leading axis of size 1. What
    # is read around the loop keeps that shape, see elastic_average.
    block, row = own_params.block_and_row(leading)
    blocks = block([xs[i] for i in moves])

    # 2. and 3. A step of them all.
    def agree(carry):
      steps, center, outer_state, floats, _ = carry
      points, steps = row((blocks, steps))
      centers = treedef.flatten_up_to(center)
      # Differences, as they are small: their sum is exact to more digits.
      gaps = [
        centers[i] - (x + u)
        for i, x, u in zip(moves, points, steps, strict=True)
      ]
      sums = collectives.sum_leaves(
        gaps + floats, [names] * (len(gaps) + len(floats))
      )
      means = [x / jnp.asarray(size, x.dtype) for x in sums]
      # What takes no part has not moved.
      moved = [jnp.zeros_like(c) for c in centers]
      for i, mean in zip(moves, means[: len(gaps)], strict=True):
        moved[i] = mean
      outer_steps, outer_state = outer.update(
        treedef.unflatten(moved), outer_state, center
      )
      news = treedef.flatten_up_to(optax.apply_updates(center, outer_steps))
      news = [news[i] if i in moves else c for i, c in enumerate(centers)]
      return (
        block([news[i] - x for i, x in zip(moves, points, strict=True)]),
        treedef.unflatten(news),
        outer_state,
        means[len(gaps) :],
        period_after(round_end, state.period),
      )

    floats, with_floats = _floats(new_inner_state)
    results = (
      block([steps[i] for i in moves]),
      state.center,
      state.outer_state,
      floats if averages else [],
      state.period,
    )
    # Equal on all replicas, so all of them agree or none.
    ends = ticks >= state.period
    if communication_period == 1:
      results = agree(results)
    else:
      results = change_if(ends, agree, results, names)
    new_steps, center, outer_state, averaged, period = results
    for i, step in zip(moves, row(new_steps), strict=True):
      steps[i] = step
    if averages:
      new_inner_state = with_floats(averaged)
    own = LocalReplica(optax.safe_increment(own.local_step), new_inner_state)
    return treedef.unflatten(steps), LocalUpdatesState(
      global_step=jnp.where(
        ends, optax.safe_increment(state.global_step), state.global_step
      ),
      ticks=jnp.where(ends, 0, ticks),
      round_start=jnp.where(ends, round_end, state.round_start),
      period=period,
      center=center,
      outer_state=outer_state,
      replica=as_block(axes.cast_to_varying(own, names), leading),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _floats(tree: Any) -> tuple[list, Callable[[list], Any]]:
  """Returns a tree's floating-point leaves, and what puts others in their place."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  at = [
    i
    for i, x in enumerate(leaves)
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  ]

  def replace(new):
    for i, x in zip(at, new, strict=True):
      leaves[i] = x
    return treedef.unflatten(leaves)

  return [leaves[i] for i in at], replace
