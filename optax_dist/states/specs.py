"""Which parts of a state belong to one replica, and how they are sharded."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from optax_dist._internal import axes
from optax_dist._internal.replica_blocks import PerReplica


def _is_per_replica(node: Any) -> bool:
  return isinstance(node, PerReplica)


def _mark(state: Any, per_replica: Any, replicated: Any) -> Any:
  def mark(node):
    if _is_per_replica(node):
      return jax.tree.map(lambda _: per_replica, node)
    return replicated

  return jax.tree.map(mark, state, is_leaf=_is_per_replica)


def state_specs(state: Any, axis_name: axes.AxisNames) -> Any:
  """Returns the PartitionSpecs of an optimizer state, for ``jax.shard_map``.

  Args:
    state: an optax state, or its ``jax.eval_shape``, with states of this library
      anywhere in it.
    axis_name: the mesh axis, or a sequence of axes, that the replicas lie along.

  Returns:
    A pytree like ``state``: ``PartitionSpec(axis_name)`` for what belongs to one
    replica, ``PartitionSpec()`` for what is equal on all.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=4
    ... )
    >>> specs = optax_dist.state_specs(tx.init(jnp.zeros(2)), "data")
    >>> P = jax.sharding.PartitionSpec
    >>> specs.global_step == P(), specs.replica.value.local_step == P("data")
    (True, True)
  """
  names = axes.canonical_names(axis_name)
  spec = PartitionSpec(names if len(names) > 1 else names[0])
  return _mark(state, spec, PartitionSpec())


def state_axes(state: Any) -> Any:
  """Returns the batch axes of an optimizer state, for ``jax.vmap`` and ``pmap``.

  Args:
    state: an optax state, or its ``jax.eval_shape``, with states of this library
      anywhere in it.

  Returns:
    A pytree like ``state``, for ``in_axes`` and ``out_axes``: 0 for what belongs
    to one replica, None for what is equal on all.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=4
    ... )
    >>> state_axes = optax_dist.state_axes(tx.init(jnp.zeros(2)))
    >>> state_axes.global_step, state_axes.replica.value.local_step
    (None, 0)
  """
  return _mark(state, 0, None)
