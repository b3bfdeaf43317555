"""Local updates in fragments: some parameters at a time, and in no hurry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import axes, collectives, own_params, replicas
from optax_dist._internal.in_place import change_if
from optax_dist._internal.replica_blocks import PerReplica, as_block, own_block
from optax_dist.sparse.indexed_slices import is_indexed_slices
from optax_dist.transforms.local_updates import LocalReplica

_USER = "streaming_updates"

Fragments = int | Callable[[optax.Params], Any]


class StreamingUpdatesState(NamedTuple):
  """State of :func:`streaming_updates`.

  Attributes:
    ticks: steps made, modulo the period (int32 scalar, equal on all replicas).
    syncs: how often each fragment was sent (int32 array of one element per
      fragment, equal on all). See :func:`streaming_traffic`.
    center: what the replicas last agreed on, equal on all. See
      :func:`optax_dist.center_params`.
    pending: the mean of what the replicas have moved since, sent and not yet
      applied, equal on all; None without a delay.
    outer_state: one state of the outer transformation per fragment, equal on all.
    replica: one :class:`optax_dist.LocalReplica` per replica.
  """

  ticks: jax.Array
  syncs: jax.Array
  center: Any
  pending: Any
  outer_state: tuple
  replica: PerReplica


def streaming_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: int,
  fragments: Fragments,
  delay: int = 0,
  mix: float = 0.0,
  num_replicas: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """As ``local_updates``, but a group of the parameters at a time.

  Each *fragment* has rounds of its own, of ``communication_period`` steps, and
  their ends are spread over the period, so that what is sent at one step is
  smaller by the number of fragments. When the round of a fragment ends, the mean
  over the replicas of what its parameters have moved since their common start is
  sent. ``delay`` steps later it is applied: ``outer`` moves the fragment's start
  by it, and each replica's parameters become ``mix * own + (1 - mix) * start``.
  The steps in between hide the transfer, where they run in one program with it.

  With one fragment, no delay and no mixing this is
  :func:`optax_dist.local_updates`, which also says how parameters and state are
  carried.

  Args:
    inner: the transformation that updates each replica's parameters.
    outer: the transformation that updates the common start of a fragment. It sees
      the parameters of the others as ``optax.MaskedNode``.
    axis_name: the axis, or a sequence of axes, that the replicas lie along.
    communication_period: steps in a fragment's round; a positive integer. Of
      ``n`` fragments, number ``i`` is sent at steps ``(i + 1) *
      communication_period // n``, and every period from there.
    fragments: how many there are, or a function of the parameters that returns a
      pytree like them of each one's fragment, integers from 0. A number deals
      the parameters out in turn, as strided layers in the paper.
    delay: steps from sending to applying; from 0 to less than the period.
    mix: what of their own parameters replicas keep; from 0 to 1.
    num_replicas: as in ``local_updates``.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`StreamingUpdatesState`. A parameter whose gradient is None takes no
    part.

  Raises:
    ValueError, TypeError, UnboundAxisError: as ``local_updates``; in ``init`` and
      ``update``, if ``fragments`` does not name each fragment from 0.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> tx = streaming_updates(
    ...   optax.adamw(4e-4), optax.sgd(0.7, momentum=0.9, nesterov=True), "data",
    ...   communication_period=100, fragments=2, delay=5, mix=0.5, num_replicas=4,
    ... )
    >>> state = tx.init({"a": jnp.zeros(3), "b": jnp.zeros(5)})
    >>> streaming_traffic(state, fragments=2)
    array([0, 0])

  References:
    Douillard et al. 2025, `Streaming DiLoCo with overlapping communication
    <https://arxiv.org/abs/2501.18512>`_.
  """
  names = axes.canonical_names(axis_name)
  own_params.check_count("num_replicas", num_replicas, or_none=True)
  own_params.check_count("communication_period", communication_period)
  if not callable(fragments):
    own_params.check_count("fragments", fragments)
  if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
    raise ValueError(
      f"`delay` must be an integer, not negative, got {delay!r}."
    )
  if delay >= communication_period:
    raise ValueError(
      f"`delay` must be less than `communication_period`, got {delay} and"
      f" {communication_period}."
    )
  if not 0.0 <= mix <= 1.0:
    raise ValueError(f"`mix` must be from 0 to 1, got {mix!r}.")
  inner = optax.with_extra_args_support(inner)

  def init_fn(params):
    size = replicas.at_init(_USER, names, num_replicas)
    # Not weakly typed: types must not change in the first update.
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    center = own_params.common(params, names)
    members = _members(fragments, center)
    own = LocalReplica(jnp.zeros([], jnp.int32), inner.init(params))
    return StreamingUpdatesState(
      ticks=jnp.zeros([], jnp.int32),
      syncs=jnp.zeros([len(members)], jnp.int32),
      center=center,
      pending=jax.tree.map(jnp.zeros_like, center) if delay else None,
      outer_state=tuple(outer.init(_only(center, at)) for at in members),
      replica=replicas.start(own, size, names),
    )

  def update_fn(updates, state, params=None, **extra_args):
    size = replicas.in_update(_USER, names, num_replicas)
    replicas.check_counter(_USER, state.ticks, names)
    xs, gradients, treedef = own_params.flatten_with_updates(
      _USER, params, updates, names
    )
    centers = own_params.flatten_center(_USER, params, state.center)
    members = _members(fragments, params)
    if len(members) != len(state.outer_state):
      raise ValueError(
        f"{_USER}: the state was made with {len(state.outer_state)} fragments, but"
        f" there are {len(members)}."
      )
    own, leading = own_block(
      state.replica, state.replica.value.local_step, _USER
    )
    block, row = own_params.block_and_row(leading)
    steps, inner_state = inner.update(
      updates, own.inner_state, params, **extra_args
    )
    steps = treedef.flatten_up_to(steps)
    pending = treedef.flatten_up_to(state.pending) if delay else []
    outer_states = list(state.outer_state)
    syncs = state.syncs
    ticks = (state.ticks + 1) % communication_period

    def due(fragment, later):
      end = (fragment + 1) * communication_period // len(members) + later
      return ticks == end % communication_period

    def moved(at, points):
      """The mean of what the replicas have moved since the common start."""
      gaps = [centers[i] - x for i, x in zip(at, points, strict=True)]
      sums = collectives.sum_leaves(gaps, [names] * len(gaps))
      return [x / jnp.asarray(size, x.dtype) for x in sums]

    def apply(fragment, at, means, outer_state, points):
      """The fragment's new start, and the replica's parameters."""
      # What takes no part has not moved.
      gradient = [jnp.zeros_like(c) for c in centers]
      for i, mean in zip(at, means, strict=True):
        gradient[i] = mean
      start = _only(treedef.unflatten(centers), members[fragment])
      outer_steps, outer_state = outer.update(
        _only(treedef.unflatten(gradient), members[fragment]),
        outer_state,
        start,
      )
      news = treedef.flatten_up_to(optax.apply_updates(start, outer_steps))
      news = [news[i] for i in at]
      points = [
        new + _times(mix, x - new) if mix else new
        for x, new in zip(points, news, strict=True)
      ]
      return news, outer_state, points

    for fragment, members_of in enumerate(members):
      at = [i for i in members_of if gradients[i] is not None]
      for i in at:
        if is_indexed_slices(steps[i]):
          steps[i] = steps[i].to_dense()
      own_blocks = block([xs[i] for i in at])
      sends = due(fragment, 0)

      if delay:
        # Sent when the round ends; applied later, once something was sent.
        points = [xs[i] + steps[i] for i in at]

        # What the loop does not change, the compiler may compute outside of
        # it, in every step: so the points change.
        def send(carry, at=at):
          held, points = carry
          return moved(at, points), held

        held = [pending[i] for i in at]
        news, _ = change_if(sends, send, (held, points), names)
        for i, new in zip(at, news, strict=True):
          pending[i] = new
        applies = due(fragment, delay) & (syncs[fragment] > 0)
      else:
        applies = sends

      def change(carry, fragment=fragment, at=at, own_blocks=own_blocks):
        steps, _, outer_state = carry
        own, steps = row((own_blocks, steps))
        points = [x + u for x, u in zip(own, steps, strict=True)]
        means = [pending[i] for i in at] if delay else moved(at, points)
        news, outer_state, points = apply(
          fragment, at, means, outer_state, points
        )
        steps = [p - x for p, x in zip(points, own, strict=True)]
        return block(steps), news, outer_state

      new_steps, new_centers, outer_states[fragment] = change_if(
        applies,
        change,
        (
          block([steps[i] for i in at]),
          [centers[i] for i in at],
          outer_states[fragment],
        ),
        names,
      )
      for i, step, center in zip(at, row(new_steps), new_centers, strict=True):
        steps[i], centers[i] = step, center
      syncs = jnp.where(
        sends & (jnp.arange(len(members)) == fragment),
        optax.safe_increment(syncs),
        syncs,
      )
    own = LocalReplica(optax.safe_increment(own.local_step), inner_state)
    return treedef.unflatten(steps), StreamingUpdatesState(
      ticks=ticks,
      syncs=syncs,
      center=treedef.unflatten(centers),
      pending=treedef.unflatten(pending) if delay else None,
      outer_state=tuple(outer_states),
      replica=as_block(axes.cast_to_varying(own, names), leading),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def streaming_traffic(state: Any, fragments: Fragments) -> np.ndarray:
  """Returns the bytes that each replica has handed over, of each fragment.

  Args:
    state: a state with one of :func:`streaming_updates` in it, as a whole.
    fragments: as given to ``streaming_updates``.

  Returns:
    An int64 array of one element per fragment: how often it was sent, times the
    bytes of its parameters. What a collective moves for that depends on how it is
    made; a ring moves about twice as much.

  Raises:
    ValueError: if there is not exactly one such state.
  """
  is_state = lambda node: isinstance(node, StreamingUpdatesState)
  found = list(filter(is_state, jax.tree.leaves(state, is_leaf=is_state)))
  if len(found) != 1:
    raise ValueError(
      "There must be one state of streaming_updates in the state; there are"
      f" {len(found)}."
    )
  leaves = jax.tree.leaves(found[0].center)
  sizes = [
    sum(leaves[i].nbytes for i in at)
    for at in _members(fragments, found[0].center)
  ]
  return np.asarray(found[0].syncs, np.int64) * np.asarray(sizes, np.int64)


def _members(fragments: Fragments, params: optax.Params) -> list[list[int]]:
  """The indices of each fragment's leaves."""
  leaves = jax.tree.leaves(params)
  if callable(fragments):
    of_leaf = jax.tree.leaves(fragments(params))
    numbers = {int(f) for f in of_leaf}
    if len(of_leaf) != len(leaves) or numbers != set(range(len(numbers))):
      raise ValueError(
        f"{_USER}: `fragments` must return the fragment of each of"
        f" {len(leaves)} parameters, numbered from 0 without gaps, got {of_leaf}."
      )
  else:
    if fragments > max(1, len(leaves)):
      raise ValueError(
        f"{_USER}: `fragments` is {fragments}, but there are {len(leaves)}"
        " parameters."
      )
    of_leaf = [i % fragments for i in range(len(leaves))]
    numbers = set(range(fragments))
  return [
    [i for i, f in enumerate(of_leaf) if int(f) == number]
    for number in sorted(numbers)
  ]


def _only(tree: Any, at: list[int]) -> Any:
  """Returns a tree with all but the leaves ``at`` masked."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(
    [x if i in at else optax.MaskedNode() for i, x in enumerate(leaves)]
  )


def _times(factor: float, x: jax.Array) -> jax.Array:
  return x * jnp.asarray(factor, x.dtype)
