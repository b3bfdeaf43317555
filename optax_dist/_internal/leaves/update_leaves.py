"""Checks of the leaves of a tree of updates, and their names.

A user who passes something else than a replica's own gradients gets an error that
names the leaf, instead of a wrong mean.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, provenance
from optax_dist._internal.indexed_slices import is_indexed_slices, values_of

_SUMMED = (
  "it arrived already summed over the replicas, and can't be split again."
  " Differentiate with respect to optax_dist.local_params(params, axis_name)."
)
_REDUCED_BEFORE = (
  "it was averaged or summed over the replicas before, for example by jax.lax.pmean,"
  " by cross_shard or by a loss scale such as flax's DynamicScale with `axis_name`,"
  " and can't be split again. Leave that out: each replica passes its own gradient."
)


def name_of(path: jax.tree_util.KeyPath) -> str:
  """Returns the name of a leaf for messages: ``updates['w']``."""
  return "updates" + jax.tree_util.keystr(path)


def check_dtype(
  transform_name: str, path: jax.tree_util.KeyPath, leaf: Any
) -> None:
  """Checks that a leaf has a dtype that can be averaged.

  Raises:
    TypeError: if it is not floating-point or complex; names the leaf.
  """
  dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
  if not jnp.issubdtype(dtype, jnp.inexact):
    # The gradient of an integer, which NumPy calls [('float0', 'V')].
    shown = "float0" if dtype == jax.dtypes.float0 else dtype
    raise TypeError(
      f"{transform_name} aggregates floating-point and complex updates, but"
      f" {name_of(path)} is {shown}. Leave it out (None, or optax.masked), or"
      " cast it."
    )


def check_like(transform_name: str, updates: Any, params: Any) -> list[Any]:
  """Checks that updates have the structure and the shapes of their parameters.

  Returns:
    The leaves of the updates, one for each parameter.

  Raises:
    ValueError: if they don't; names the difference.
  """
  treedef: Any
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  try:
    leaves = treedef.flatten_up_to(updates)
  except ValueError as error:
    raise ValueError(
      f"{transform_name}: `updates` must have the structure of `params`, but {error}"
    ) from error
  for (path, param), leaf in zip(paths_and_leaves, leaves, strict=True):
    if leaf is None:
      continue
    shape = leaf.dense_shape if is_indexed_slices(leaf) else jnp.shape(leaf)
    if shape != jnp.shape(param):
      raise ValueError(
        f"{transform_name}: {name_of(path)} must have the shape of its parameter,"
        f" {jnp.shape(param)}, got {shape}."
      )
  return leaves


def check_gradients(
  transform_name: str,
  updates: Any,
  names: tuple[axes.AxisName, ...],
  remedy: str,
) -> None:
  """Checks that updates are a replica's own gradients, not summed yet.

  Args:
    transform_name: the transform that needs them, for the message.
    updates: a pytree of gradients, dense or sparse.
    names: names of the bound axes over the replicas.
    remedy: see :func:`provenance.check_whole`.

  Raises:
    TypeError: if a gradient is not floating-point or complex.
    ValueError: if one is equal on all replicas, or one shard of a sum.
  """
  tracked = axes.tracked_axes(names)
  known = provenance.Known()
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=is_indexed_slices
  )
  for path, leaf in leaves:
    leaf = values_of(leaf)
    check_dtype(transform_name, path, leaf)
    what = f"{transform_name}: {name_of(path)}"
    missing = tracked - axes.varying_axes(leaf)
    if missing:
      origins = {provenance.origin_of(leaf, n, known) for n in missing}
      raise ValueError(
        f"{what} does not vary over axis {axes.listed(missing)}: "
        + (_REDUCED_BEFORE if origins == {"caller"} else _SUMMED)
      )
    provenance.check_whole(what, leaf, names, remedy, known)
