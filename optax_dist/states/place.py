"""Putting arrays where a mesh has them."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from optax_dist.states.specs import is_spec

Tree = TypeVar("Tree")


def place(tree: Tree, mesh: jax.sharding.Mesh, specs: Any) -> Tree:
  """Puts each array of a tree onto a mesh, sharded as its spec says.

  With several processes each of them gives the same whole arrays, and gets the
  global ones, of which it holds the part of its own devices.

  Args:
    tree: a pytree of arrays: parameters, a batch, a state.
    mesh: the mesh.
    specs: a pytree of ``PartitionSpec`` like ``tree``, or a prefix of it: one spec
      for all, or what :func:`optax_dist.state_specs` returns.

  Returns:
    The same values, as sharded ``jax.Array``. As by ``jax.device_put``, what is on
    its device already is not copied: who donates the result gives ``tree`` away.

  Raises:
    ValueError: if ``specs`` does not fit ``tree``, if an axis is not in the mesh,
      or if a dimension can't be divided by it; names the array.

  Example:
    >>> import jax, jax.numpy as jnp, optax_dist
    >>> P = jax.sharding.PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> batch = optax_dist.place({"x": jnp.ones((4, 2))}, mesh, P("data"))
    >>> batch["x"].sharding.spec
    P('data',)
  """

  def put(path: Any, x: Any, spec: Any) -> Any:
    where = f"place: {jax.tree_util.keystr(path) or 'the array'}"
    try:
      sharding = NamedSharding(mesh, spec)
      sharding.shard_shape(np.shape(x))
    except (ValueError, IndexError) as error:
      raise ValueError(
        f"{where} of shape {np.shape(x)} can't be sharded as {spec} over the mesh"
        f" {dict(mesh.shape)}: {error}"
      ) from error
    is_traced = isinstance(x, jax.core.Tracer)
    is_global = is_traced or (
      isinstance(x, jax.Array) and not x.is_fully_addressable
    )
    if sharding.is_fully_addressable or is_global:
      return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

  by_leaf = jax.tree.map(
    lambda spec, part: jax.tree.map(lambda _: spec, part),
    specs,
    tree,
    is_leaf=is_spec,
  )
  return jax.tree_util.tree_map_with_path(put, tree, by_leaf)
