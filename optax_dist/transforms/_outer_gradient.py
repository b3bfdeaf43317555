"""The outer gradient and the outer step of DiLoCo's Algorithm 1.

The gradient is the mean over the replicas of how far they moved, as it is or
compressed: what :mod:`.local_updates` and :mod:`.streaming` communicate.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, replica_params
from optax_dist._internal.indexed_slices import apply_updates
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  aggregate,
)


@dataclasses.dataclass(frozen=True)
class OuterGradient:
  """The mean over the replicas, with one message per dtype.

  Attributes:
    compression: a compression method, with which a replica that is not finite has
      not moved; None for the mean over the replicas that are finite, 0 where none
      is.
    reject_nonfinite: see :func:`optax_dist.local_updates`.
    mix: see :func:`optax_dist.streaming_updates`.
  """

  compression: Compression | None
  reject_nonfinite: bool
  mix: float = 0.0

  def init(self, center: Any) -> CompressionState:
    """Returns the compression's state, which is kept from round to round."""
    if self.compression is None:
      return CompressionState(None, None, jnp.zeros([], jnp.int32))
    return self.compression.init(replica_params.unmoved(center))

  def of(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    points: list[jax.Array],
    kept: CompressionState,
  ) -> tuple[list[jax.Array], CompressionState, jax.Array]:
    """Returns the mean of ``center - points``.

    Args:
      me: the replica.
      leaves: the parameters that take part.
      center: the common start of all parameters.
      points: this replica's parameters that take part.
      kept: the compression's state from the last round.

    Returns:
      The mean of each parameter that takes part, the compression's state for the next
      round, and whether this replica is finite (boolean scalar).
    """
    start = leaves.of(center)
    gaps = [c - cast_like(x, c) for x, c in zip(points, start, strict=True)]
    gaps, finite = me.finite_or_zero(gaps, self.reject_nonfinite)
    if self.compression is None:
      sent = [finite.astype(jnp.float32), *gaps]
      count, *sums = me.sum(axes.cast_to_varying(sent, me.of.names))
      divisor = jnp.maximum(count, 1)
      return [x / divisor.astype(x.dtype) for x in sums], kept, finite
    # In a tree of all parameters, so that the state's structure never changes.
    tree = leaves.put(replica_params.unmoved(center), gaps)
    mean, new = aggregate(self.compression, tree, kept, me.of.names)
    decay = self.compression.error_feedback
    if self.mix and decay is not None:
      # A share `mix` of the residual stays in the replica's own parameters, and so is
      # part of the next round's change already.
      residual = jax.tree.map(
        lambda left, before: (1 - self.mix) * left + self.mix * decay * before,
        new.residual,
        kept.residual,
      )
      new = new._replace(residual=residual)
    return leaves.of(mean), new, finite


def outer_step(
  outer: optax.GradientTransformationExtraArgs,
  leaves: Leaves,
  center: Any,
  gradient: list[jax.Array],
  state: Any,
  only: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[list[jax.Array], Any]:
  """Returns the new start of the parameters that take part, and the new state.

  Args:
    outer: the outer transformation.
    leaves: the parameters that take part.
    center: the start of all parameters.
    gradient: the outer gradient of the parameters that take part.
    state: the state of the outer transformation.
    only: masks the parameters that the outer transformation does not get.
  """
  start = only(center)
  # Parameters that do not take part have not moved.
  gaps = only(leaves.put(replica_params.unmoved(center), gradient))
  steps, state = outer.update(gaps, state, start)
  return leaves.of(apply_updates(start, steps)), state


def towards(
  x: jax.Array, u: jax.Array, point: jax.Array, start: jax.Array, mix: float = 0
) -> jax.Array:
  """The step from ``x`` to ``mix * point + (1 - mix) * start``, like ``u``."""
  point = cast_like(point, start)
  new = (
    start + (point - start) * jnp.asarray(mix, start.dtype) if mix else start
  )
  return cast_like(new - cast_like(x, start), u)
