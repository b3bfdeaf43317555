"""Parameters that each replica has its own of: their start, and checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, collectives, update_leaves
from optax_dist.sparse.indexed_slices import is_indexed_slices


def common(params: Any, names: tuple[axes.AxisName, ...]) -> Any:
  """Returns a copy of the first replica's parameters, equal on all replicas.

  Outside of the map, and where the type says that they are equal already, it is a
  copy of ``params``. It is a copy because it must not share a buffer that is
  donated.
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  leaves = [jnp.array(x, jnp.result_type(x)) for x in leaves]
  if not axes.bound_axes().keys() >= set(names):
    return treedef.unflatten(leaves)
  tracked = any(axes.is_tracked(name) for name in names)
  is_first = jnp.asarray(True)
  for name in names:
    is_first &= jax.lax.axis_index(name) == 0
  differs = [
    i
    for i, x in enumerate(leaves)
    if jnp.issubdtype(x.dtype, jnp.number)
    and (not tracked or axes.varying_axes(x) & set(names))
  ]
  # "where", since a replica that is not the first may hold NaN.
  firsts = [
    jnp.where(is_first, leaves[i], jnp.zeros_like(leaves[i])) for i in differs
  ]
  for i, x in zip(
    differs, collectives.sum_leaves(firsts, [names] * len(firsts)), strict=True
  ):
    leaves[i] = x
  return treedef.unflatten(leaves)


def flatten_with_updates(
  user: str,
  params: optax.Params | None,
  updates: optax.Updates,
  names: tuple[axes.AxisName, ...],
) -> tuple[list, list, Any]:
  """Returns the leaves of ``params``, those of ``updates``, and their treedef.

  An update is None where its parameter has no gradient, and may be an
  ``IndexedSlices``.

  Raises:
    ValueError: if there are no parameters, if an update has no parameter, or if
      a parameter is, by its type, equal on all replicas.
    TypeError: if an update is not floating-point or complex.
  """
  if params is None:
    raise ValueError(
      f"{user} needs the parameters: call update(updates, state, params)."
    )
  treedef: Any
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  try:
    leaves = treedef.flatten_up_to(updates)
  except ValueError as error:
    raise ValueError(
      f"{user}: `updates` must have the structure of `params`, but {error}"
    ) from error
  for (path, _), update in zip(paths_and_leaves, leaves, strict=True):
    update = update.values if is_indexed_slices(update) else update
    if update is not None:
      update_leaves.check_dtype(user, path, update)
  tracked = frozenset(name for name in names if axes.is_tracked(name))
  for path, leaf in paths_and_leaves:
    missing = tracked - axes.varying_axes(leaf)
    if missing:
      raise ValueError(
        f"{user}: params{jax.tree_util.keystr(path)} does not vary over axis"
        f" {', '.join(sorted(map(repr, missing)))}: it is one parameter of all"
        " replicas, but each must have its own. Give the parameters a leading"
        " replica axis and pass them with in_specs=PartitionSpec(axis_name), or,"
        " where they start out equal inside the map, cast them with"
        " optax_dist.local_params(params, axis_name)."
      )
  return [leaf for _, leaf in paths_and_leaves], leaves, treedef


def flatten_center(user: str, params: optax.Params, center: Any) -> list:
  """Returns the leaves of ``center``, in the order of those of ``params``.

  Raises:
    ValueError: if a shape differs.
  """
  treedef: Any
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  centers = treedef.flatten_up_to(center)
  for (path, x), c in zip(paths_and_leaves, centers, strict=True):
    if jnp.shape(x) != jnp.shape(c):
      raise ValueError(
        f"{user}: params{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, but"
        f" the center has {jnp.shape(c)}. Pass one replica's parameters: inside"
        " jax.shard_map, take its block's only row, as in"
        " jax.tree.map(lambda x: x[0], params)."
      )
  return centers


def block_and_row(leading: bool) -> tuple[Callable, Callable]:
  """Returns functions of trees that add a leading axis of size 1, and drop it.

  Args:
    leading: whether there is such an axis: else both are the identity.
  """
  if not leading:
    return lambda tree: tree, lambda tree: tree
  return (
    lambda tree: jax.tree.map(lambda x: x[None], tree),
    lambda tree: jax.tree.map(lambda x: x[0], tree),
  )


def check_count(name: str, value: Any, *, or_none: bool = False) -> None:
  """Checks that an argument is a positive integer.

  Raises:
    ValueError: if it is not.
  """
  if or_none and value is None:
    return
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
