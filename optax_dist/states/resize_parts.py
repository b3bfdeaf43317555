"""Resizes the state of sharded to another number of replicas."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, checks, parts
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  map_nodes,
  nodes,
)
from optax_dist._internal.placement.specs import (
  Found,
  Numbered,
  children,
  match_params,
)
from optax_dist.states.resize import on_host
from optax_dist.transforms.sharded import ShardedState

_NAME = "resize_sharded"


def resize_sharded(state: Any, params: Any, num_replicas: int) -> Any:
  """Reshards the state of :func:`sharded` for another number of replicas.

  Use it to resume a job from a checkpoint on more or fewer devices. No values
  change: each array is joined and split into ``num_replicas`` parts.

  Parts of parameters that are sharded over model axes too can't be cut anew:
  each holds the elements of one shard. That is an error where the shapes or the
  arrays' shardings show it. A checkpoint restored as NumPy arrays has no
  shardings.

  Args:
    state: a complete optax state with states of ``sharded`` in it, outside of
      the map.
    params: the parameters, or their shapes.
    num_replicas: the new number of replicas; a positive integer.

  Returns:
    A state of the same structure, for ``num_replicas`` replicas. Its parts are
    in host memory: shard them as at the start.

  Raises:
    ValueError: if an argument is invalid, if there is no state of ``sharded``,
      if its parts do not match ``params``, or if some of them lie on other
      hosts' devices.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> params = {"w": jnp.zeros((2, 3))}
    >>> tx = optax_dist.sharded(optax.trace(0.9), "data", num_replicas=4)
    >>> state = tx.init(params)
    >>> state.inner_state.trace["w"].value.shape
    (4, 2, 1)
    >>> state = optax_dist.states.resize_sharded(state, params, 3)
    >>> state.inner_state.trace["w"].value.shape
    (3, 2, 1)
  """
  checks.count("num_replicas", num_replicas)
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  like = treedef.unflatten(
    [Numbered(i, jnp.shape(leaf)) for i, leaf in enumerate(leaves)]
  )
  is_state = lambda node: isinstance(node, ShardedState)
  if not nodes(state, is_state):
    raise ValueError(f"{_NAME}: there is no state of sharded in this state.")
  resize = lambda node: _resized(node, like, num_replicas)
  return map_nodes(resize, state, is_state)


def _resized(node: Any, like: Any, count: int) -> Any:
  leaves: list[Any] = []
  matched = match_params(node, like, leaves)
  if matched is not None and any(isinstance(x, PerReplica) for x in leaves):
    return jax.tree.map(
      lambda leaf: _cut(leaf, count),
      matched,
      is_leaf=lambda x: isinstance(x, Found),
    )
  if isinstance(node, PerReplica):
    raise ValueError(
      f"{_NAME}: the state has parts of arrays, of shape"
      f" {jnp.shape(node.value)}, that are not in a tree like `params`."
    )
  if jax.tree_util.all_leaves([node]):
    return node
  nodes, treedef = children(node)
  return treedef.unflatten([_resized(x, like, count) for x in nodes])


def _cut(leaf: Found, count: int) -> Any:
  if not isinstance(leaf.leaf, PerReplica):
    return leaf.leaf
  old, shape = leaf.leaf.value, leaf.param.spec
  if _is_over_model_axes(old):
    raise ValueError(
      f"{_NAME}: the parts of a parameter of shape {shape} are sharded over model"
      " axes too, so each has the elements of one shard, and can't be cut anew."
      " Where the map had these axes as Auto ones, and only the compiler sharded"
      " the parts, pass jax.device_get(state)."
    )
  fits = jnp.ndim(old) and jnp.shape(old)[1:] == parts.shape_of(
    shape, old.shape[0]
  )
  if not fits:
    raise ValueError(
      f"{_NAME}: the state has parts of shape {jnp.shape(old)} for a parameter of"
      f" shape {shape}. Call it outside of maps, with the parameters that the"
      " state was made for; parts that are sharded over model axes too can't be"
      " cut anew."
    )
  old = on_host(_NAME, old)
  return PerReplica(on_host(_NAME, parts.rows(parts.whole(old, shape), count)))


def _is_over_model_axes(part: Any) -> bool:
  """Whether the array's sharding says that its columns are shards."""
  if isinstance(part, jax.core.Tracer):
    return False
  sharding = getattr(part, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return False
  names = axes.names_in(sharding.spec[1:])
  return any(sharding.mesh.shape[name] > 1 for name in names)
