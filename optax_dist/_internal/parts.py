"""Leaves cut into one flat part per replica: reduced into them, gathered again.

Part ``r`` of a leaf is row ``r`` of its elements, padded with zeros, in as many rows
as there are replicas. The rows of all leaves of a dtype lie side by side in one
buffer, so that one message serves them all and each leaf still has a part of its
own on every replica.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, collectives

Names = tuple[axes.AxisName, ...]


def length(shape: Sequence[int], count: int) -> int:
  """Returns how many elements each of ``count`` parts of a leaf has."""
  size = 1
  for dim in shape:
    size *= dim
  return -(-size // count)


def rows(x: jax.Array, count: int) -> jax.Array:
  """Returns the parts of a leaf, of shape ``[count, length]``."""
  each = length(x.shape, count)
  flat = jnp.ravel(x)
  missing = count * each - flat.size
  if missing:
    flat = jnp.concatenate([flat, jnp.zeros([missing], x.dtype)])
  return flat.reshape(count, each)


def whole(parts: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Puts the parts of a leaf together: undoes :func:`rows`."""
  size = 1
  for dim in shape:
    size *= dim
  flat = parts.reshape(-1)
  return (flat[:size] if flat.size != size else flat).reshape(shape)


def own(x: jax.Array, names: Names, count: int) -> jax.Array:
  """Returns this replica's part of a leaf that is equal on all of them."""
  index = jax.lax.axis_index(names if len(names) > 1 else names[0])
  return jax.lax.dynamic_index_in_dim(rows(x, count), index, keepdims=False)


def reduce_scatter(
  leaves: Sequence[jax.Array], names: Names, count: int
) -> list[jax.Array]:
  """Sums leaves over the replicas; each gets its own part of the sums.

  Args:
    leaves: each replica's own arrays.
    names: the bound axes that the replicas lie along.
    count: how many replicas there are.

  Returns:
    Flat arrays, with one reduce-scatter per dtype.
  """
  results: list[Any] = [None] * len(leaves)
  for at in _buckets(leaves).values():
    buffer = _side_by_side([rows(leaves[i], count) for i in at])
    part = _scatter(buffer, names)
    for i, x in zip(
      at,
      _apart(part, [length(leaves[i].shape, count) for i in at]),
      strict=True,
    ):
      results[i] = x
  return results


def all_gather(
  parts: Sequence[jax.Array],
  shapes: Sequence[Sequence[int]],
  names: Names,
  count: int,
) -> list[jax.Array]:
  """Returns the whole leaves, equal on all replicas, from their parts.

  Args:
    parts: flat arrays, as :func:`reduce_scatter` returns them.
    shapes: of the leaves.
    names: the bound axes that the replicas lie along.
    count: how many replicas there are.

  Returns:
    Arrays of these shapes, with one all-gather per dtype.
  """
  parts = [axes.cast_to_varying(x, names) for x in parts]
  results: list[Any] = [None] * len(parts)
  for at in _buckets(parts).values():
    together = _side_by_side([parts[i] for i in at])
    gathered = collectives.gather_rows(together, names).reshape(count, -1)
    for i, x in zip(
      at, _apart(gathered, [parts[i].size for i in at]), strict=True
    ):
      results[i] = whole(x, shapes[i])
  return results


def _buckets(leaves: Sequence[jax.Array]) -> dict[Any, list[int]]:
  """Returns which leaves share a buffer: those of one dtype, and of one type."""
  buckets: dict[Any, list[int]] = {}
  for i, x in enumerate(leaves):
    buckets.setdefault((x.dtype, axes.varying_axes(x)), []).append(i)
  return buckets


def _side_by_side(xs: list[jax.Array]) -> jax.Array:
  return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=-1)


def _apart(x: jax.Array, lengths: list[int]) -> list[jax.Array]:
  if len(lengths) == 1:
    return [x]
  return jnp.split(
    x, [sum(lengths[:i]) for i in range(1, len(lengths))], axis=-1
  )


def _scatter(buffer: jax.Array, names: Names) -> jax.Array:
  on_mesh = axes.mesh_axes()
  if len(names) == 1 or on_mesh.issuperset(names):
    name = names if len(names) > 1 else names[0]
    return jax.lax.psum_scatter(buffer, name)
  (total,) = collectives.sum_leaves([buffer], [names])
  index = jax.lax.axis_index(names)
  return jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
