"""One replica's block of a state: marking, extracting and restoring it.

With these marks the same state passes through ``vmap``, ``pmap`` and ``shard_map``, a
checkpoint and a change of the number of replicas.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: The remedy if a replica does not get its own state.
PASS_STATE = (
  "Pass the state into the map with in_specs=optax_dist.states.state_specs(state,"
  " axis_name) for jax.shard_map, or in_axes=optax_dist.states.state_axes(state) for"
  " jax.vmap and jax.pmap, and out of it in the same way."
)


class PerReplica(NamedTuple):
  """Marks a part of a state that differs between replicas.

  As a whole, each array in it has a leading replica axis. Inside a map it is
  one replica's block: with a leading axis of size 1 under ``jax.shard_map``,
  without it under ``jax.vmap`` and ``jax.pmap``.

  Attributes:
    value: a pytree of arrays.
  """

  value: Any


class PerShard(NamedTuple):
  """Marks an array that belongs to one shard of a parameter.

  It is not a piece of anything that the whole parameter has. Inside a map it is
  this shard's; as a whole, the shards' follow each other along the first axis.

  Attributes:
    value: an array of any shape, the same for all shards.
  """

  value: Any


def nodes(tree: Any, is_node: Callable[[Any], bool]) -> list[Any]:
  """Returns the parts of a tree that fulfil ``is_node``, the outermost ones."""
  return list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def map_nodes(
  fun: Callable[[Any], Any], tree: Any, is_node: Callable[[Any], bool]
) -> Any:
  """Returns a tree with ``fun`` applied to each of its :func:`nodes`."""
  return jax.tree.map(
    lambda x: fun(x) if is_node(x) else x, tree, is_leaf=is_node
  )


def is_per_replica(x: Any) -> bool:
  """Whether ``x`` is a :class:`PerReplica`; for ``is_leaf=``."""
  return isinstance(x, PerReplica)


def has_replicas(tree: Any) -> bool:
  """Whether any part of a tree is a :class:`PerReplica`."""
  return bool(nodes(tree, is_per_replica))


def is_center_state(node: Any) -> bool:
  """Whether a state has a center; for ``is_leaf=``."""
  fields = getattr(node, "_fields", ())
  return "center" in fields and "replica" in fields


def has_center(state: Any) -> bool:
  """Whether a part of a state has a center, so each replica its own parameters."""
  return bool(nodes(state, is_center_state))


def own_block(
  node: PerReplica, scalar: Any, transform_name: str
) -> tuple[Any, bool]:
  """Returns one replica's values, and whether they had a leading axis.

  Args:
    node: one replica's part of a state, inside a map.
    scalar: an array of ``node`` that is a scalar per replica: its rank tells
      whether there is a leading axis.
    transform_name: the transform that needs the values, for the message.

  Raises:
    ValueError: if the block is not a single replica's.
  """
  if jnp.ndim(scalar) == 0:
    return node.value, False
  if jnp.shape(scalar) != (1,):
    raise ValueError(
      f"{transform_name}: this replica sees the state of {jnp.shape(scalar)[0]}"
      f" replicas. {PASS_STATE}"
    )
  return row(node.value), True


def as_block(value: Any, leading: bool) -> PerReplica:
  """Restores one replica's block, with a leading axis if there was one."""
  return PerReplica(block(value) if leading else value)


def row(tree: Any) -> Any:
  """Drops the leading axis, of size 1, of every array."""
  # A single operation, while indexing would trace and compile several.
  return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), tree)


def block(tree: Any) -> Any:
  """Gives every array a leading axis of size 1: undoes :func:`row`."""
  return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), tree)
