"""The transform that aggregates with compression."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, provenance
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.placement.replica_blocks import PerReplica
from optax_dist._internal.replicas import Replicas
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  aggregate,
  check_compression,
)

_SCATTERED = (
  "so nothing is left to send in fewer bytes. Leave it out of `compression`"
  " (optax.partition), and use cross_shard(..., param_specs=...) for it."
)


class CompressedReplica(NamedTuple):
  """State of one replica of a compressed aggregation.

  Attributes:
    local_step: updates so far (int32 scalar).
    residual: for each leaf, what was not sent yet (float32), or None.
  """

  local_step: jax.Array
  residual: Any


class CompressedState(NamedTuple):
  """State of :func:`optax_dist.cross_shard` with ``compression``.

  Attributes:
    num_updates: updates so far (int32 scalar, equal on all replicas).
    shared: the method's state that is equal on all replicas.
    replica: one :class:`CompressedReplica` per replica.
  """

  num_updates: jax.Array
  shared: Any
  replica: PerReplica


def compressed(
  transform_name: str,
  compression: Compression,
  axis_name: axes.AxisNames,
  num_replicas: int | None,
  reduction: str,
) -> optax.GradientTransformationExtraArgs:
  """Replaces updates with their compressed mean or sum over the replicas.

  Args:
    transform_name: the transform that this is part of, for messages.
    compression: the method.
    axis_name: the axis, or a sequence of axes, over the replicas.
    num_replicas: the number of replicas; None for the size of the axes.
    reduction: ``"mean"`` or ``"sum"``.

  Raises:
    TypeError: at construction, if the method is not a compression.
  """
  check_compression(transform_name, compression)
  replicas = Replicas.of(transform_name, axis_name, num_replicas, ())

  def init_fn(params):
    size = replicas.at_init()
    state = compression.init(params)
    own = CompressedReplica(jnp.zeros([], jnp.int32), state.residual)
    return CompressedState(
      state.num_updates, state.shared, replicas.start(own, size)
    )

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    me = replicas.validate_and_enter(state.replica, state.num_updates)
    update_leaves.check_gradients(
      transform_name, updates, replicas.names, _SCATTERED
    )
    new, method = aggregate(
      compression,
      updates,
      CompressionState(me.own.residual, state.shared, state.num_updates),
      replicas.names,
    )
    with provenance.reduced_over(replicas.names):
      size = me.size if reduction == "sum" else 1
      new = jax.tree.map(lambda x: precision.scaled(x, size), new)
    own = CompressedReplica(me.own.local_step + 1, method.residual)
    return new, CompressedState(
      method.num_updates, method.shared, me.as_state(own)
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
