"""Clipping by the global norm of updates that are sharded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import axes, checks, collectives, shard_scope
from optax_dist._internal.indexed_slices import (
  is_indexed_slices,
  map_values,
  sum_duplicates,
)
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.placement.specs import specs_of_updates

_NAME = "clip_by_global_norm"

Names = tuple[axes.AxisName, ...]


def clip_by_global_norm(
  max_norm: jax.typing.ArrayLike,
  axis_name: axes.AxisNames,
  *,
  param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Clips updates by their global norm over all shards.

  Inside ``jax.shard_map``, stock ``optax.clip_by_global_norm`` sees only the
  shards of one device: it clips each model shard by its own norm, which makes
  the model inconsistent. Here each leaf's squares are summed over the axes it
  is sharded over, and a leaf that is equal along an axis counts once. The
  result equals ``optax.clip_by_global_norm`` on the unsharded tree. As there,
  put it after the transform that averages over the replicas::

    optax.chain(
        optax_dist.cross_shard("data"),
        optax_dist.clip_by_global_norm(1.0, "model"),
        optax.adam(1e-3),
    )

  Inside :func:`optax_dist.sharded`, also include the replica axis: there each
  replica sees a part of the gradient.

  Args:
    max_norm: the maximum norm of the updates; a positive number or a scalar
      array.
    axis_name: the axis, or a sequence of axes, over which leaves may be
      sharded: the model axes, and the data axes for gradients that are sharded
      over these (FSDP). It must not include an axis over which updates are
      still per replica.
    param_specs: a pytree like the updates of ``PartitionSpec``, or a prefix of
      it, which specifies the axes that each leaf is sharded over. None to use
      the types, under ``shard_map(check_vma=True)``; it is required everywhere
      else.

  Returns:
    A stateless :class:`optax.GradientTransformationExtraArgs`. It communicates
    one number per set of axes that leaves are sharded over: usually one.

  Raises:
    ValueError: at construction, if an argument is invalid; in ``update``, if
      the sharding of the updates is unknown, or ``param_specs`` does not match.
    TypeError: in ``update``, if an update is not floating-point or complex.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp, optax_dist
    >>> P = jax.sharding.PartitionSpec
    >>> tx = optax_dist.clip_by_global_norm(1.0, "model", param_specs=P("model"))
    >>> clip = lambda shard: tx.update(shard, tx.init(shard))[0]
    >>> jax.vmap(clip, axis_name="model")(jnp.array([3.0, 4.0]))
    Array([0.6, 0.8], dtype=float32)

  References:
    Pascanu et al. 2012, `On the difficulty of training Recurrent Neural Networks
    <https://arxiv.org/abs/1211.5063>`_.
  """
  names = axes.canonical_names(axis_name)
  # Infinity, as in optax, for no clipping.
  if not (isinstance(max_norm, float | np.floating) and max_norm == math.inf):
    checks.rate("max_norm", max_norm, positive=True)

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params, extra_args
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(
      updates, is_leaf=is_indexed_slices
    )
    for path, leaf in paths_and_leaves:
      update_leaves.check_dtype(_NAME, path, leaf)
    leaves = [leaf for _, leaf in paths_and_leaves]
    if shard_scope.current().is_inspection:
      factor = jnp.ones([], jnp.float32)
    else:
      axes.check_bound(names, _NAME)
      over = _sharded_over(updates, leaves, names, param_specs)
      factor = _factor(leaves, over, names, max_norm)
    return map_values(lambda x: precision.scaled(x, factor), updates), state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )


def _factor(
  leaves: list[Any], over: list[Names], names: Names, max_norm: Any
) -> jax.Array:
  """The factor for all leaves: 1 if there is nothing to clip."""
  squares = [_sum_of_squares(leaf) for leaf in leaves]
  # In float64 if any leaf is.
  dtype = np.result_type(np.float32, *(square.dtype for square in squares))
  groups: dict[Names, jax.Array] = {}
  for square, sharded in zip(squares, over, strict=True):
    # A leaf that is equal along an axis, although its type varies over it.
    equal = tuple(
      name
      for name in names
      if name not in sharded and name in axes.varying_axes(square)
    )
    if equal:
      square = jax.lax.pmean(square, equal)
    so_far = groups.get(sharded, jnp.zeros([], dtype))
    groups[sharded] = so_far + square.astype(dtype)
  sums = collectives.sum_leaves(list(groups.values()), list(groups))
  norm = jnp.sqrt(sum(sums, start=jnp.zeros([], dtype)))
  limit = jnp.asarray(max_norm, dtype)
  return jnp.where(norm < limit, jnp.ones_like(norm), limit / norm)


def _sharded_over(
  updates: optax.Updates, leaves: list[Any], names: Names, param_specs: Any
) -> list[Names]:
  """Returns, for each leaf, the axes that it is sharded over."""
  scope = shard_scope.current().names
  # The flat parts from `sharded` are sharded over its axes, and over model
  # axes according to types or specs.
  untracked = [
    name for name in names if name not in scope and not axes.is_tracked(name)
  ]
  if param_specs is not None:
    specs = specs_of_updates(_NAME, param_specs, updates)
    known = [frozenset(axes.names_in(spec)) for spec in specs]
  elif untracked:
    raise ValueError(
      f"{_NAME}: JAX does not track here which updates vary over axis"
      f" {', '.join(map(repr, untracked))}. Say how they are sharded with"
      " `param_specs`, a tree of PartitionSpec, or use jax.shard_map with"
      " check_vma=True."
    )
  else:
    known = [axes.all_varying_axes(leaf) for leaf in leaves]
  return [
    tuple(n for n in names if n in of_leaf or n in scope) for of_leaf in known
  ]


def _sum_of_squares(leaf: Any) -> jax.Array:
  if is_indexed_slices(leaf):
    leaf = sum_duplicates(leaf).values
  if jnp.finfo(leaf.dtype).bits < 32:
    leaf = leaf.astype(jnp.float32)
  # For complex numbers as in optax: the square of the absolute value.
  square = jnp.square(leaf.real)
  if jnp.iscomplexobj(leaf):
    square += jnp.square(leaf.imag)
  return jnp.sum(square)
