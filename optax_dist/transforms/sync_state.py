"""The state of sync_replicas: what it counts, and what each replica holds."""

from typing import Any, NamedTuple

import jax

from optax_dist._internal.replica_blocks import PerReplica


class ReplicaState(NamedTuple):
  """What one replica of :func:`optax_dist.sync_replicas` holds.

  Attributes:
    gradient_sum: the accepted gradients since the last step, added up; where
      there are none it is left over from the last step, and means nothing.
    num_accumulated: how many these are (int32 scalar).
    local_step: the global step that the replica last took a token of (int32
      scalar): the step of the parameters that its gradients belong to.
    accepted: gradients accepted so far (int32 scalar).
    absent: ticks without a gradient so far (int32 scalar).
    dropped_stale: gradients dropped as too old so far (int32 scalar).
    dropped_nonfinite: gradients dropped as not finite so far (int32 scalar).
    dropped_overflow: gradients dropped so far because a sparse one had more rows
      than there are slots left (int32 scalar).
    dropped_departed: gradients that went with a replica (int32 scalar), see
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
  """State of :func:`optax_dist.sync_replicas`.

  Attributes:
    global_step: updates made so far (int32 scalar, equal on all replicas).
    ticks: calls of ``update`` since the last step (int32 scalar, equal on all).
    inner_state: state of the inner transformation, equal on all replicas.
    averages: moving averages of the parameters, or None.
    replica: one :class:`ReplicaState` per replica.
  """

  global_step: jax.Array
  ticks: jax.Array
  inner_state: Any
  averages: Any
  replica: PerReplica
