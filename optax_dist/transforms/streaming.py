"""Local updates in fragments: some parameters at a time, with delayed means."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, checks, replica_params
from optax_dist._internal.extra_args import check_used, explained
from optax_dist._internal.leaves import precision
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_blocks import PerReplica
from optax_dist._internal.replicas import Replica, Replicas
from optax_dist._internal.steady_state import with_steady_state
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  check_compression,
)
from optax_dist.sparse.indexed_slices import apply_updates, as_dense
from optax_dist.transforms._outer_gradient import OuterGradient
from optax_dist.transforms.local_updates import LocalReplica

_NAME = "streaming_updates"

Fragments = int | Callable[[optax.Params], Any]


class StreamingUpdatesState(NamedTuple):
  """State of :func:`streaming_updates`.

  Attributes:
    iterations: steps taken, modulo the period (int32 scalar, equal on all replicas).
    syncs: how often each fragment was sent (int32 array with one element per
      fragment, equal on all).
    center: the parameters that the replicas last agreed on, equal on all. See
      :func:`optax_dist.center_params`.
    pending: the replicas' mean change that was sent and is not yet applied,
      equal on all; None without a delay.
    outer_state: one state of the outer transformation per fragment, equal on all.
    replica: one :class:`optax_dist.transforms.local_updates.LocalReplica` per replica;
      its ``residual`` has for each fragment a tree like the parameters, in which
      those of others are ``optax.MaskedNode``, or None without ``compression``.
    shared: for each fragment, a compression's state that is equal on all replicas,
      or None.
  """

  iterations: jax.Array
  syncs: jax.Array
  center: Any
  pending: Any
  outer_state: tuple
  replica: PerReplica
  shared: tuple


class _Fragment(NamedTuple):
  """What a fragment's part of a step changes.

  Attributes:
    steps, center, pending: trees of all parameters.
    outer_state: the fragment's own state of the outer transformation.
    kept: the fragment's own state of the compression.
    dropped: rounds of any fragment that this replica did not take part in.
  """

  steps: Any
  center: Any
  pending: Any
  outer_state: Any
  kept: CompressionState
  dropped: jax.Array


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
  reject_nonfinite: bool = True,
  center_dtype: Any = None,
  model_axes: axes.AxisNames | None = None,
  compression: Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Like ``local_updates``, but for one group of the parameters at a time.

  Each *fragment* has its own rounds, of ``communication_period`` steps, and
  their ends are spread over the period, so that what is sent at one step is
  smaller by the number of fragments. When the round of a fragment ends, the
  replicas' mean change of its parameters since their common start is sent.
  ``delay`` steps later it is applied: ``outer`` moves the fragment's start by
  it, and each replica's parameters become ``mix * own + (1 - mix) * start``.
  The steps in between hide the transfer, if they run in one program with it.

  With one fragment, no delay and no mixing this is
  :func:`optax_dist.local_updates`, which also describes how to pass parameters
  and state.

  Args:
    inner: the transformation that updates each replica's parameters.
    outer: the transformation that updates the common start of a fragment. It
      sees the other parameters as ``optax.MaskedNode``.
    axis_name: the axis, or a sequence of axes, over the replicas.
    communication_period: steps in a fragment's round; a positive integer. Of
      ``n`` fragments, number ``i`` is sent at step ``(i + 1) *
      communication_period // n``, and then once per period.
    fragments: the number of fragments, or a function of the parameters that
      returns a pytree like them with each one's fragment, integers from 0. A
      number distributes the parameters round-robin, like strided layers in the
      paper.
    delay: steps from sending to applying; from 0 to less than the period.
    mix: the weight of the replicas' own parameters; from 0 to 1.
    num_replicas: see ``local_updates``, like all that follow.
    reject_nonfinite: whether replicas that are not finite are excluded.
    center_dtype: dtype of the common start and of the communication.
    model_axes: further axes over which each replica's parameters are sharded.
    compression: a method of :mod:`optax_dist.compression`, to average a
      fragment's change in fewer bytes, with its own error feedback; None for no
      compression. ``mix`` of what a round left out is still in the replica's
      own parameters, so only the rest is fed back.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`StreamingUpdatesState`. A parameter whose gradient is None does not
    take part.

  Raises:
    ValueError, TypeError, UnboundAxisError: as in ``local_updates``; in
      ``init`` and ``update``, if ``fragments`` does not name each fragment from
      0.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> tx = streaming_updates(
    ...   optax.adamw(4e-4), optax.sgd(0.7, momentum=0.9, nesterov=True), "data",
    ...   communication_period=100, fragments=2, delay=5, mix=0.5, num_replicas=4,
    ... )
    >>> state = tx.init({"a": jnp.zeros(3), "b": jnp.zeros(5)})
    >>> state.syncs
    Array([0, 0], dtype=int32)

  References:
    Douillard et al. 2025, `Streaming DiLoCo with overlapping communication
    <https://arxiv.org/abs/2501.18512>`_.
  """
  replicas = Replicas.of(_NAME, axis_name, num_replicas, model_axes)
  period = checks.count("communication_period", communication_period)
  if not callable(fragments):
    fragments = checks.count("fragments", fragments)
  delay = checks.count("delay", delay, least=0)
  if delay >= period:
    raise ValueError(
      f"`delay` must be less than `communication_period`, got {delay} and"
      f" {period}."
    )
  checks.flag("reject_nonfinite", reject_nonfinite)
  checks.fraction("mix", mix)
  precision.check_dtype("center_dtype", center_dtype)
  inner = with_steady_state(inner)
  outer = with_steady_state(outer, "outer")
  if compression is not None:
    check_compression(_NAME, compression)
  outer_gradient = OuterGradient(compression, reject_nonfinite, mix)

  def init_fn(params: optax.Params) -> StreamingUpdatesState:
    size = replicas.at_init()
    params = replica_params.strong(params)
    center = replica_params.common(params, replicas.names, center_dtype)
    members = _members(fragments, center)
    zero = lambda: jnp.zeros([], jnp.int32)
    kept = [
      outer_gradient.init(_only(center, at, like=center)) for at in members
    ]
    residuals = tuple(of_fragment.residual for of_fragment in kept)
    own = LocalReplica(
      zero(),
      replica_params.check_inner(_NAME, inner.init(params)),
      zero(),
      residuals,
    )
    return StreamingUpdatesState(
      iterations=zero(),
      syncs=jnp.zeros([len(members)], jnp.int32),
      center=center,
      pending=jax.tree.map(jnp.zeros_like, center) if delay else None,
      outer_state=tuple(
        outer.init(_only(center, at, like=center)) for at in members
      ),
      replica=replicas.start(own, size),
      shared=tuple(of_fragment.shared for of_fragment in kept),
    )

  def outer_step(
    center: Any,
    start: list[Any],
    gap: list[Any],
    leaves: replica_params.Leaves,
    outer_state: Any,
    of: list[int],
  ) -> tuple[list[Any], Any]:
    """The new start of a fragment: a step of the outer transformation."""
    start = _only(leaves.put(center, start), of, like=center)
    # Parameters that do not take part have not moved.
    gaps = leaves.put(replica_params.unmoved(center), gap)
    steps, outer_state = outer.update(
      _only(gaps, of, like=center), outer_state, start
    )
    return leaves.of(apply_updates(start, steps)), outer_state

  def turn(
    me: Replica,
    params: Any,
    leaves: replica_params.Leaves,
    of: list[int],
    sends: jax.Array,
    applies: jax.Array,
    now: _Fragment,
  ) -> _Fragment:
    """One fragment's part of a step."""
    x, u, start = leaves.of(params), leaves.of(now.steps), leaves.of(now.center)
    points = [x + u for x, u in zip(x, u, strict=True)]

    def send() -> tuple[Any, ...]:
      """The mean over the replicas of start - parameters."""
      its_center = _only(now.center, of, like=now.center)
      mean, kept, finite = outer_gradient.of(
        me, leaves, its_center, points, now.kept
      )
      return mean, kept, now.dropped + (~finite).astype(jnp.int32)

    pending = now.pending
    received = leaves.of(pending) if delay else [], now.kept, now.dropped
    if delay:
      received = axes.when(sends, send, lambda: received)
      pending = leaves.put(pending, received[0])

    def apply() -> tuple[Any, ...]:
      """The fragment's new start, and the replica's new parameters."""
      gap, *rest = received if delay else send()
      new, outer_state = outer_step(
        now.center, start, gap, leaves, now.outer_state, of
      )
      moves = [_towards(*xs, mix) for xs in zip(x, u, points, new, strict=True)]
      return moves, new, outer_state, rest

    u, start, outer_state, (kept, dropped) = axes.when(
      applies, apply, lambda: (u, start, now.outer_state, [*received[1:]])
    )
    steps, center = leaves.put(now.steps, u), leaves.put(now.center, start)
    return _Fragment(steps, center, pending, outer_state, kept, dropped)

  def count(
    iterations: jax.Array, syncs: jax.Array
  ) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The counters after this step, and which fragments to send and apply."""
    iterations = (iterations + 1) % period
    ends = [(i + 1) * period // syncs.size for i in range(syncs.size)]
    turns = []
    for i, end in enumerate(ends):
      sends = applies = iterations == end % period
      if delay:
        applies = (iterations == (end + delay) % period) & (syncs[i] > 0)
      turns.append((sends, applies))
    sent = jnp.stack([sends for sends, _ in turns])
    syncs = jnp.where(sent, optax.safe_increment(syncs), syncs)
    return iterations, syncs, turns

  def update_fn(
    updates: optax.Updates,
    state: StreamingUpdatesState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, StreamingUpdatesState]:
    me, moving = replica_params.validate_and_enter(
      replicas, state, params, updates
    )
    own = me.own
    members = _members(fragments, params)
    if len(members) != len(state.outer_state):
      raise ValueError(
        f"{_NAME}: the state was made with {len(state.outer_state)} fragments, but"
        f" there are {len(members)}."
      )
    args = updates, own.inner_state, params
    check_used(_NAME, inner.update, args, extra_args)
    with explained(_NAME, replicas.names):
      steps, inner_state = inner.update(*args, **extra_args)
    steps = moving.put(steps, as_dense(moving.of(steps)))
    iterations, syncs, turns = count(state.iterations, state.syncs)

    center, pending = state.center, state.pending
    dropped = own.dropped_nonfinite
    after: list[_Fragment] = []
    for i, (of, (sends, applies)) in enumerate(
      zip(members, turns, strict=True)
    ):
      kept = CompressionState(own.residual[i], state.shared[i], state.syncs[i])
      now = _Fragment(
        steps, center, pending, state.outer_state[i], kept, dropped
      )
      now = turn(me, params, moving.among(of), of, sends, applies, now)
      steps, center = now.steps, now.center
      pending, dropped = now.pending, now.dropped
      after.append(now)

    own = LocalReplica(
      local_step=optax.safe_increment(own.local_step),
      inner_state=inner_state,
      dropped_nonfinite=dropped,
      residual=tuple(fragment.kept.residual for fragment in after),
    )
    return steps, StreamingUpdatesState(
      iterations=iterations,
      syncs=syncs,
      center=center,
      pending=pending,
      outer_state=tuple(fragment.outer_state for fragment in after),
      replica=me.as_state(own),
      shared=tuple(fragment.kept.shared for fragment in after),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _members(fragments: Fragments, params: optax.Params) -> list[list[int]]:
  """The indices of each fragment's leaves."""
  leaves = jax.tree.leaves(params)
  if callable(fragments):
    of_leaf = jax.tree.leaves(fragments(params))
    numbers = {int(f) for f in of_leaf}
    if len(of_leaf) != len(leaves) or numbers != set(range(len(numbers))):
      raise ValueError(
        f"{_NAME}: `fragments` must return the fragment of each of"
        f" {len(leaves)} parameters, numbered from 0 without gaps, got {of_leaf}."
      )
  else:
    if fragments > max(1, len(leaves)):
      raise ValueError(
        f"{_NAME}: `fragments` is {fragments}, but there are {len(leaves)}"
        " parameters."
      )
    of_leaf = [i % fragments for i in range(len(leaves))]
    numbers = set(range(fragments))
  return [
    [i for i, f in enumerate(of_leaf) if int(f) == number]
    for number in sorted(numbers)
  ]


def _only(tree: Any, at: list[int], like: Any) -> Any:
  """Returns a tree like ``like`` with all but the leaves ``at`` masked."""
  treedef: Any = jax.tree.structure(like)
  leaves, kept = treedef.flatten_up_to(tree), set(at)
  return treedef.unflatten(
    [x if i in kept else optax.MaskedNode() for i, x in enumerate(leaves)]
  )


def _towards(
  x: jax.Array, u: jax.Array, point: jax.Array, start: jax.Array, mix: float
) -> jax.Array:
  """The step from ``x`` to ``mix * point + (1 - mix) * start``, like ``u``."""
  point = cast_like(point, start)
  new = (
    start + (point - start) * jnp.asarray(mix, start.dtype) if mix else start
  )
  return cast_like(new - cast_like(x, start), u)
