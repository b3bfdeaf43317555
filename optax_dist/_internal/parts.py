"""Splits leaves into one flat part per replica, and joins them again.

Part ``r`` of a leaf is row ``r`` of its elements, padded with zeros, in as many
rows as there are replicas, so that each leaf has its own part on every replica.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist._internal import axes, collectives
from optax_dist._internal.leaves import packing

# Elements of a TPU tile of one-dimensional arrays.
_TILE = 1024

Names = tuple[axes.AxisName, ...]


def length(shape: Sequence[int], count: int) -> int:
  """Returns the number of elements in each of ``count`` parts of a leaf.

  At least one, so that no part is empty: compilers crash on empty parts.
  """
  size = 1
  for dim in shape:
    size *= dim
  return max(1, -(-size // count))


def rows(x: jax.Array, count: int) -> jax.Array:
  """Returns the parts of a leaf, of shape ``[count, length]``."""
  to = _sharding(x, count)
  to = to.update(spec=PartitionSpec(None, *to.spec))
  return axes.in_auto(lambda x: _rows(x, count), to, x)


def _sharding(x: jax.Array, count: int) -> NamedSharding:
  """Returns how a part of ``x`` is sharded: over the Explicit axes of ``x``.

  If its length is not divisible by their size, it is not sharded.
  """
  whole = axes.sharding_of(x)
  used = tuple(axes.names_in(whole.spec))
  size = math.prod(whole.mesh.shape[name] for name in used)
  fits = used and length(x.shape, count) % size == 0
  return whole.update(spec=PartitionSpec(used if fits else None))


def _rows(x: jax.Array, count: int) -> jax.Array:
  each = length(x.shape, count)
  if not x.size:
    zeros = jnp.zeros((count, each), x.dtype)
    return axes.cast_to_varying(zeros, axes.varying_axes(x))
  missing = count * each - x.size
  if not missing:
    return jax.lax.reshape(x, (count, each))
  flat = jnp.concatenate([jnp.ravel(x), jnp.zeros([missing], x.dtype)])
  return flat.reshape(count, each)


def whole(parts: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Joins the parts of a leaf: undoes :func:`rows`."""
  size = 1
  for dim in shape:
    size *= dim
  if not size:
    zeros = jnp.zeros(tuple(shape), parts.dtype)
    return axes.cast_to_varying(zeros, axes.varying_axes(parts))
  if parts.size == size:
    return jax.lax.reshape(parts, shape)
  return jax.lax.reshape(parts.reshape(-1)[:size], shape)


def own(x: jax.Array, names: Names, count: int) -> jax.Array:
  """Returns this replica's part of a leaf that is equal on all replicas."""

  def part(x: jax.Array) -> jax.Array:
    index = jax.lax.axis_index(names if len(names) > 1 else names[0])
    return jax.lax.dynamic_index_in_dim(
      _rows(x, count), index, keepdims=False, allow_negative_indices=False
    )

  return axes.in_auto(part, _sharding(x, count), x)


def reduce_scatter(
  leaves: Sequence[jax.Array], names: Names, count: int, mean: bool = False
) -> list[jax.Array]:
  """Sums leaves over the replicas; each gets its own part of the sums.

  Args:
    leaves: each replica's own arrays.
    names: the bound axes over the replicas.
    count: the number of replicas.
    mean: whether to divide the sums by ``count``.

  Returns:
    Flat arrays.
  """

  def scatter(leaves: list[jax.Array]) -> list[jax.Array]:
    results: list[Any] = [None] * len(leaves)
    for at in _messages(leaves):
      rows = packing.join([_rows(leaves[i], count) for i in at])
      part = _scatter(_in_tiles(rows), names)
      if mean:
        part = part / jnp.asarray(count, part.dtype)
      lengths = [length(leaves[i].shape, count) for i in at]
      for i, x in zip(at, packing.split(part, lengths), strict=True):
        results[i] = x
    return results

  to = [_sharding(x, count) for x in leaves]
  return axes.in_auto(scatter, to, list(leaves))


def all_gather(
  parts: Sequence[jax.Array],
  like: Sequence[jax.Array],
  names: Names,
  count: int,
) -> list[jax.Array]:
  """Returns the whole leaves from their parts, equal on all replicas.

  Args:
    parts: flat arrays, as :func:`reduce_scatter` returns them.
    like: arrays of the shapes and the shardings of the leaves.
    names: the bound axes over the replicas.
    count: the number of replicas.
  """

  def gather(parts: list[jax.Array]) -> list[jax.Array]:
    results: list[Any] = [None] * len(parts)
    for at in _messages(parts):
      row = _in_tiles(packing.join([parts[i] for i in at]))
      rows = collectives.gather_rows(row, names)
      lengths = [parts[i].size for i in at]
      columns = packing.split(rows.reshape(count, -1), lengths)
      for i, x in zip(at, columns, strict=True):
        results[i] = whole(x, like[i].shape)
    return results

  parts = [axes.cast_to_varying(x, names) for x in parts]
  return axes.in_auto(gather, list(like), parts)


def _in_tiles(x: jax.Array) -> jax.Array:
  """Pads the last axis for TPU.

  For sizes that aren't whole tiles the compiler uses an all-reduce with zeros,
  which moves twice the bytes.
  """
  if axes.platform() != "tpu":
    return x
  missing = -x.shape[-1] % _TILE
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def _messages(arrays: Sequence[jax.Array]) -> list[list[int]]:
  """Returns the indices of arrays that share a message: those of one type."""
  messages: dict[Any, list[int]] = {}
  for i, x in enumerate(arrays):
    messages.setdefault((x.dtype, axes.varying_axes(x)), []).append(i)
  return list(messages.values())


def _scatter(buffer: jax.Array, names: Names) -> jax.Array:
  on_mesh = axes.mesh_axes()
  if len(names) == 1 or on_mesh.issuperset(names):
    name = names if len(names) > 1 else names[0]
    return jax.lax.psum_scatter(buffer, name)
  (total,) = collectives.sum_leaves([buffer], [names])
  index = jax.lax.axis_index(names)
  return jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
