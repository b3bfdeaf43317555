"""Which parts of a state belong to one replica, and how they are sharded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_dist import axes


class PerReplica(NamedTuple):
  """Marks a part of a state that differs from replica to replica.

  Seen as a whole, each array in it has a leading replica axis. Seen by one
  replica inside a map it is that replica's block: with a leading axis of size 1
  under ``jax.shard_map``, without it under ``jax.vmap`` and ``jax.pmap``.

  Attributes:
    value: a pytree of arrays.
  """

  value: Any


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


def own_block(node: PerReplica, scalar: Any, user: str) -> tuple[Any, bool]:
  """Returns one replica's values, and whether they had a leading axis.

  Args:
    node: one replica's part of a state, inside a map.
    scalar: an array of ``node`` that is a scalar per replica: its rank tells
      whether there is a leading axis.
    user: what needs the values, for the message.

  Raises:
    ValueError: if the block is not a single replica's.
  """
  if jnp.ndim(scalar) == 0:
    return node.value, False
  if jnp.shape(scalar) != (1,):
    raise ValueError(
      f"{user}: this replica sees the state of {jnp.shape(scalar)[0]} replicas."
      " Pass the state into the map with in_specs=optax_dist.state_specs(state,"
      " axis_name) for jax.shard_map, or in_axes=optax_dist.state_axes(state) for"
      " jax.vmap and jax.pmap, and out of it in the same way."
    )
  return jax.tree.map(lambda x: x[0], node.value), True


def as_block(value: Any, leading: bool) -> PerReplica:
  """Puts one replica's values back, with a leading axis where they had one."""
  if leading:
    value = jax.tree.map(lambda x: x[None], value)
  return PerReplica(value)
