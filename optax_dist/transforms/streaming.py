"""Local updates in fragments: some parameters at a time, with delayed means."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, checks
from optax_dist._internal.indexed_slices import as_dense
from optax_dist._internal.inner import checked
from optax_dist._internal.placement.replica_blocks import PerReplica
from optax_dist._internal.replica_params import Leaves, Trainers
from optax_dist._internal.replicas import Replica
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  check_compression,
)
from optax_dist.transforms._outer_gradient import (
  OuterGradient,
  outer_step,
  towards,
)
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
  trainers = Trainers.of(
    _NAME, inner, axis_name, num_replicas, center_dtype, model_axes
  )
  outer = checked(_NAME, outer, trainers.replicas.names, argument="outer")
  check_compression(_NAME, compression)
  outer_gradient = OuterGradient(compression, reject_nonfinite, mix)
  streams = _Streams(trainers, outer, outer_gradient, period, fragments, delay)
  return optax.GradientTransformationExtraArgs(streams.init, streams.update)


class _Fragment(NamedTuple):
  """A fragment of the parameters.

  Attributes:
    number: the fragment's.
    members: the indices of its leaves.
    leaves: those that take part.
    x: their parameters.
    u: their steps.
  """

  number: int
  members: list[int]
  leaves: Leaves
  x: list[jax.Array]
  u: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Streams:
  """The rounds of :func:`streaming_updates`, whose arguments are its attributes."""

  trainers: Trainers
  outer: optax.GradientTransformationExtraArgs
  outer_gradient: OuterGradient
  period: int
  fragments: Fragments
  delay: int

  def init(self, params: optax.Params) -> StreamingUpdatesState:
    size, center, inner_state = self.trainers.init(params)
    parts = [_only(center, at) for at in _members(self.fragments, center)]
    kept = [self.outer_gradient.init(part) for part in parts]
    zero = lambda: jnp.zeros([], jnp.int32)
    residuals = tuple(of_fragment.residual for of_fragment in kept)
    own = LocalReplica(zero(), inner_state, zero(), residuals)
    return StreamingUpdatesState(
      iterations=zero(),
      syncs=jnp.zeros([len(parts)], jnp.int32),
      center=center,
      pending=jax.tree.map(jnp.zeros_like, center) if self.delay else None,
      outer_state=tuple(map(self.outer.init, parts)),
      replica=self.trainers.replicas.start(own, size),
      shared=tuple(of_fragment.shared for of_fragment in kept),
    )

  def update(
    self,
    updates: optax.Updates,
    state: StreamingUpdatesState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, StreamingUpdatesState]:
    me, moving = self.trainers.validate_and_enter(state, params, updates)
    own = me.own
    members = _members(self.fragments, params)
    if len(members) != len(state.outer_state):
      raise ValueError(
        f"{_NAME}: the state was made with {len(state.outer_state)} fragments, but"
        f" there are {len(members)}."
      )
    steps, inner_state = self.trainers.inner.update(
      updates, own.inner_state, params, **extra_args
    )
    steps = moving.put(steps, as_dense(moving.of(steps)))
    iterations, syncs, turns = self._count(state)

    center, pending = state.center, state.pending
    dropped = own.dropped_nonfinite
    outer_states, keeps = [], []
    for i, of in enumerate(members):
      leaves = moving.among(of)
      fragment = _Fragment(i, of, leaves, leaves.of(params), leaves.of(steps))
      u, start, gap, outer_state, (kept, missed) = self._turn(
        me, fragment, state, *turns[i]
      )
      steps, center = leaves.put(steps, u), leaves.put(center, start)
      pending = leaves.put(pending, gap) if self.delay else None
      dropped += missed
      outer_states.append(outer_state)
      keeps.append(kept)

    own = LocalReplica(
      local_step=optax.safe_increment(own.local_step),
      inner_state=inner_state,
      dropped_nonfinite=dropped,
      residual=tuple(kept.residual for kept in keeps),
    )
    return steps, StreamingUpdatesState(
      iterations=iterations,
      syncs=syncs,
      center=center,
      pending=pending,
      outer_state=tuple(outer_states),
      replica=me.as_state(own),
      shared=tuple(kept.shared for kept in keeps),
    )

  def _turn(
    self,
    me: Replica,
    fragment: "_Fragment",
    state: StreamingUpdatesState,
    sends: jax.Array,
    applies: jax.Array,
  ) -> tuple[Any, ...]:
    """A fragment's part of a step: its change is sent, and applied, if it is time.

    Returns:
      The steps, the start and the pending change of the parameters that take part;
      the state of the outer transformation; and the compression's, with whether
      this replica was left out (int32 scalar).
    """
    i, members, leaves, x, u = fragment
    points = [x + u for x, u in zip(x, u, strict=True)]
    only = lambda tree: _only(tree, members, like=state.center)
    before = CompressionState(
      me.own.residual[i], state.shared[i], state.syncs[i]
    )

    def send() -> tuple[list[jax.Array], tuple[CompressionState, jax.Array]]:
      """The mean over the replicas of start - parameters."""
      mean, kept, finite = self.outer_gradient.of(
        me, leaves, only(state.center), points, before
      )
      return mean, (kept, (~finite).astype(jnp.int32))

    def apply(gap: list[jax.Array], kept: Any) -> tuple[Any, ...]:
      """The fragment's new start, and the replica's new parameters."""
      start, outer_state = outer_step(
        self.outer, leaves, state.center, gap, state.outer_state[i], only
      )
      mix = self.outer_gradient.mix
      moves = [
        towards(*each, mix) for each in zip(x, u, points, start, strict=True)
      ]
      return moves, start, outer_state, kept

    stay = u, leaves.of(state.center), state.outer_state[i]
    nothing = before, jnp.zeros([], jnp.int32)
    gap: list[jax.Array] = []
    if self.delay:
      pending = leaves.of(state.pending)
      gap, kept = axes.when(sends, send, lambda: (pending, nothing))
      new = axes.when(applies, lambda: apply(gap, None), lambda: (*stay, None))
      u, start, outer_state, _ = new
    else:
      u, start, outer_state, kept = axes.when(
        applies, lambda: apply(*send()), lambda: (*stay, nothing)
      )
    return u, start, gap, outer_state, kept

  def _count(
    self, state: StreamingUpdatesState
  ) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """The counters after this step, and which fragments to send and apply."""
    iterations = (state.iterations + 1) % self.period
    syncs = state.syncs
    turns = []
    for i in range(syncs.size):
      end = (i + 1) * self.period // syncs.size
      sends = applies = iterations == end % self.period
      if self.delay:
        applies = iterations == (end + self.delay) % self.period
        applies &= syncs[i] > 0
      turns.append((sends, applies))
    sent = jnp.stack([sends for sends, _ in turns])
    syncs = jnp.where(sent, optax.safe_increment(syncs), syncs)
    return iterations, syncs, turns


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


def _only(tree: Any, at: list[int], like: Any = None) -> Any:
  """Returns a tree like ``like`` (or itself) with all but the leaves ``at`` masked."""
  treedef: Any = jax.tree.structure(tree if like is None else like)
  leaves, kept = treedef.flatten_up_to(tree), set(at)
  return treedef.unflatten(
    [x if i in kept else optax.MaskedNode() for i, x in enumerate(leaves)]
  )
