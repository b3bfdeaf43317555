"""Local updates: replicas train locally, and synchronize periodically."""

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

_NAME = "local_updates"


class LocalReplica(NamedTuple):
  """State of one replica of :func:`local_updates`.

  Attributes:
    local_step: steps that the replica has taken (int32 scalar).
    inner_state: state of the inner transformation.
    dropped_nonfinite: rounds (of a fragment) that the replica did not take part
      in because its parameters were not finite (int32 scalar).
    residual: with ``compression``, what was not sent yet, for each parameter
      that takes part; otherwise None.
  """

  local_step: jax.Array
  inner_state: Any
  dropped_nonfinite: jax.Array
  residual: Any = None


class LocalUpdatesState(NamedTuple):
  """State of :func:`local_updates`.

  Attributes:
    global_step: rounds so far (int32 scalar, equal on all replicas).
    iterations: steps since the last round ended (int32 scalar, equal on all).
    round_start: steps taken before this round (int32 scalar, equal on all).
    period: steps of this round (int32 scalar, equal on all).
    center: the parameters at the start of this round, equal on all. See
      :func:`optax_dist.center_params`.
    outer_state: state of the outer transformation, equal on all.
    replica: one :class:`LocalReplica` per replica.
    shared: with ``compression``, the method's state that is equal on all;
      otherwise None.
  """

  global_step: jax.Array
  iterations: jax.Array
  round_start: jax.Array
  period: jax.Array
  center: Any
  outer_state: Any
  replica: PerReplica
  shared: Any = None


def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: int | Callable[[jax.Array], Any],
  num_replicas: int | None = None,
  reject_nonfinite: bool = True,
  center_dtype: Any = None,
  model_axes: axes.AxisNames | None = None,
  compression: Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Lets each replica take local steps, then applies their mean change.

  All replicas call ``update`` in lockstep, each with its own parameters and its
  own gradient. In each round:

  1. Each replica takes ``communication_period`` steps with ``inner``, from the
     round's common start.
  2. ``outer`` takes ``start - mean of the replicas' parameters`` as a gradient,
     and moves the start by it. This mean is the only communication.
  3. All replicas continue from there.

  With ``outer=optax.sgd(1.0)`` this is local SGD (federated averaging); other
  choices are DiLoCo, SlowMo and BMUF: see :mod:`optax_dist.transforms.presets`.

  The parameters are per replica: give them a leading replica axis outside of
  the map, and shard it. Some of the state is per replica too; pass it in and
  out of the map with :func:`optax_dist.states.state_specs` (or
  :func:`optax_dist.states.state_axes`).

  The new start is bit-identical on all replicas, and kept in the state:
  :func:`optax_dist.center_params`. Each replica's parameters get there by an
  addition, ``params + (start - params)``, which may differ from it in the last
  bits of the larger of the two. Since every round is measured from the start in
  the state, such differences do not accumulate;
  :func:`optax_dist.states.reset_to_center` removes them.

  Args:
    inner: the transformation that updates each replica's parameters. It must not
      have a center of its own: to nest replicas, use ``cross_shard`` or
      ``sync_replicas`` in it, over another axis.
    outer: the transformation that updates their common start, equal on all
      replicas. It gets no keyword arguments.
    axis_name: the axis, or a sequence of axes, over the replicas.
    communication_period: steps in a round: a positive integer, or a schedule,
      called with the steps taken so far (int32 scalar) when a round begins,
      with results below 1 counting as 1. A transformation with another period
      can take over the state: its period counts from the next round on, except
      for a period of 1, which ends the running round.
    num_replicas: the number of replicas; None for the size of the axis. It is
      required if ``init`` is called outside of the map and of ``jax.set_mesh``.
    reject_nonfinite: whether a replica with an infinite or NaN parameter is
      excluded from the mean, and counted in its state. If not, it makes the
      common start non-finite. Non-finite parameters can't continue from there
      by an addition: see :func:`optax_dist.states.reset_to_center`, and wrap ``inner``
      in ``optax.apply_if_finite`` to drop such gradients at once.
    center_dtype: dtype of the start and of the communication; None for each
      parameter's own, or float32 if that is narrower.
    model_axes: further axes over which each replica's parameters are sharded:
      all shards of a replica make the same decision. Under ``check_vma=True``
      the types show them; otherwise, if the mesh has further axes, they are
      required: ``()`` for none.
    compression: a method of :mod:`optax_dist.compression`, to average the
      differences from the start in fewer bytes; None for no compression. A
      replica that is not finite counts as one that has not moved.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`LocalUpdatesState`. Keyword arguments of ``update`` are passed to
    ``inner``. ``init`` takes the parameters without a replica axis. Outside of
    the map all replicas start from them; inside, the center is the first
    replica's, and the others join it when the first round ends. A parameter
    whose gradient is None does not take part.

  Raises:
    ValueError: at construction, if an argument is invalid; in ``init``, if the
      number of replicas is unknown; in ``update``, if the axis has another
      size, there are no parameters, or by their type they are not each
      replica's own, or the state was not passed as one replica's.
    TypeError: in ``update``, if an update is not floating-point or complex.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.local_updates(
    ...   optax.sgd(1.0), optax.sgd(0.5), "data", num_replicas=2,
    ...   communication_period=1,
    ... )
    >>> state = tx.init(jnp.zeros(()))
    >>> axes = optax_dist.states.state_axes(state)
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
  checks.flag("reject_nonfinite", reject_nonfinite)
  trainers = Trainers.of(
    _NAME, inner, axis_name, num_replicas, center_dtype, model_axes
  )
  outer = checked(_NAME, outer, trainers.replicas.names, argument="outer")
  period = communication_period
  if not callable(period):
    period = checks.count("communication_period", period)
  check_compression(_NAME, compression)
  outer_gradient = OuterGradient(compression, reject_nonfinite)
  rounds = _Rounds(trainers, outer, outer_gradient, period)
  return optax.GradientTransformationExtraArgs(rounds.init, rounds.update)


@dataclasses.dataclass(frozen=True)
class _Rounds:
  """The rounds of :func:`local_updates`, whose arguments are its attributes."""

  trainers: Trainers
  outer: optax.GradientTransformationExtraArgs
  outer_gradient: OuterGradient
  period: int | Callable[[jax.Array], Any]

  def init(self, params: optax.Params) -> LocalUpdatesState:
    size, center, inner_state = self.trainers.init(params)
    kept = self.outer_gradient.init(center)
    # Separate arrays, so that the state can be donated.
    zero = lambda: jnp.zeros([], jnp.int32)
    own = LocalReplica(zero(), inner_state, zero(), kept.residual)
    return LocalUpdatesState(
      global_step=zero(),
      iterations=zero(),
      round_start=zero(),
      period=self._period_after(zero()),
      center=center,
      outer_state=self.outer.init(center),
      replica=self.trainers.replicas.start(own, size),
      shared=kept.shared,
    )

  def _period_after(self, step: jax.Array) -> jax.Array:
    steps = self.period(step) if callable(self.period) else self.period
    return jnp.maximum(jnp.asarray(steps).astype(jnp.int32), 1)

  def update(
    self,
    updates: optax.Updates,
    state: LocalUpdatesState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalUpdatesState]:
    me, leaves = self.trainers.validate_and_enter(state, params, updates)
    own = me.own

    # An inner step of this replica.
    steps, inner_state = self.trainers.inner.update(
      updates, own.inner_state, params, **extra_args
    )
    x, u = leaves.of(params), as_dense(leaves.of(steps))
    iterations = state.iterations + 1
    ends = True if self.period == 1 else iterations >= state.period

    # What all replicas share, if the round goes on.
    in_round = state._replace(iterations=iterations, replica=PerReplica(None))
    # Equal on all replicas, so either all of them communicate or none.
    (u, dropped, residual), new_state = axes.when(
      ends,
      lambda: self._end_round(me, leaves, x, u, in_round),
      lambda: ((u, own.dropped_nonfinite, own.residual), in_round),
    )
    own = LocalReplica(
      optax.safe_increment(own.local_step), inner_state, dropped, residual
    )
    return leaves.put(steps, u), new_state._replace(replica=me.as_state(own))

  def _end_round(
    self,
    me: Replica,
    leaves: Leaves,
    x: list[jax.Array],
    u: list[jax.Array],
    state: LocalUpdatesState,
  ) -> tuple[tuple[Any, ...], LocalUpdatesState]:
    """Returns what changes of this replica, and what all share."""
    # The outer gradient: the mean over the replicas of start - parameters.
    points = [x + u for x, u in zip(x, u, strict=True)]
    kept = CompressionState(me.own.residual, state.shared, state.global_step)
    mean, kept, finite = self.outer_gradient.of(
      me, leaves, state.center, points, kept
    )
    new_start, outer_state = outer_step(
      self.outer, leaves, state.center, mean, state.outer_state
    )
    # All replicas continue from the new start.
    to_start = [
      towards(*each) for each in zip(x, u, points, new_start, strict=True)
    ]
    dropped = me.own.dropped_nonfinite + (~finite).astype(jnp.int32)
    round_end = state.round_start + state.iterations
    return (to_start, dropped, kept.residual), state._replace(
      global_step=optax.safe_increment(state.global_step),
      iterations=jnp.zeros_like(state.iterations),
      round_start=round_end,
      period=self._period_after(round_end),
      center=leaves.put(state.center, new_start),
      outer_state=outer_state,
      shared=kept.shared,
    )
