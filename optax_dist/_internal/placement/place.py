"""Places arrays on a mesh."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist._internal import checks
from optax_dist._internal.leaves.random_keys import is_key
from optax_dist._internal.placement.specs import check_specs, is_spec

Tree = TypeVar("Tree")


def place(tree: Tree, mesh: jax.sharding.Mesh, specs: Any) -> Tree:
  """Places each array of a tree on a mesh, sharded by its spec.

  With several processes, each passes the same whole arrays, and gets global
  ones, of which it holds the shards of its own devices.

  Args:
    tree: a pytree of arrays: parameters, a batch, a state.
    mesh: the mesh.
    specs: a pytree of ``PartitionSpec`` like ``tree``, or a prefix of it: one
      spec for all, or the result of :func:`optax_dist.states.state_specs`. On a mesh
      with Explicit axes an array gets one that names all of its dimensions, as the
      results of a step do, so that the next call finds the compiled program.

  Returns:
    The same values as sharded ``jax.Array``s. As with ``jax.device_put``, an
    array that is already on its device is not copied: donating the result also
    invalidates ``tree``.

  Raises:
    ValueError: if ``specs`` does not match ``tree``, if an axis is not in the
      mesh, or if a dimension is not divisible by it; the message names the
      array.

  Example:
    >>> import jax, jax.numpy as jnp, optax_dist
    >>> P = jax.sharding.PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> batch = optax_dist.states.place({"x": jnp.ones((4, 2))}, mesh, P("data"))
    >>> batch["x"].sharding.spec
    P('data', None)
  """
  checks.kind("mesh", mesh, jax.sharding.Mesh, "a jax.sharding.Mesh")

  def put(path: Any, x: Any, spec: Any) -> Any:
    where = f"place: {jax.tree_util.keystr(path) or 'the array'}"
    try:
      sharding = NamedSharding(mesh, _as_typed(spec, np.ndim(x), mesh))
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
    x = x if isinstance(x, jax.Array) and is_key(x) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

  check_specs("specs", specs)
  with checks.structure("specs", "`tree`, or of a prefix of it"):
    by_leaf = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
  return jax.tree_util.tree_map_with_path(put, tree, by_leaf)


def _as_typed(spec: Any, ndim: int, mesh: jax.sharding.Mesh) -> Any:
  if not mesh.explicit_axes:
    return spec
  return PartitionSpec(*spec, *[None] * (ndim - len(spec)))
