"""Splits leaves into one flat part per replica, and joins them again.

Part ``r`` of a leaf is row ``r`` of its elements, padded with zeros, in as many
rows as there are replicas. The rows of all leaves of a dtype are concatenated
in one buffer, so that there is one message for all and each leaf still has its
own part on every replica.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist._internal import axes, collectives
from optax_dist._internal.leaves import materialize

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


def numbers_of(leaves: Sequence[Any]) -> list[jax.Array]:
  """Returns the offsets at which leaves are split, on CPU.

  Slices at constant offsets would be separate kernels to compile there.
  """
  if axes.platform() != "cpu" or len(leaves) < 2:
    return []
  return materialize.integers(range(len(leaves)))


def reduce_scatter(
  leaves: Sequence[jax.Array],
  names: Names,
  count: int,
  numbers: list[jax.Array],
  mean: bool = False,
) -> list[jax.Array]:
  """Sums leaves over the replicas; each gets its own part of the sums.

  Args:
    leaves: each replica's own arrays.
    names: the bound axes over the replicas.
    count: the number of replicas.
    numbers: the leaves' offsets, see :func:`numbers_of`.
    mean: whether to divide the sums by ``count``.

  Returns:
    Flat arrays, with one reduce-scatter per dtype.
  """
  scatter = functools.partial(_reduce_scatter, names, count, mean)
  to = [_sharding(x, count) for x in leaves]
  return axes.in_auto(scatter, to, list(leaves), numbers)


def _reduce_scatter(
  names: Names,
  count: int,
  mean: bool,
  leaves: list[jax.Array],
  numbers: list[jax.Array],
) -> list[jax.Array]:
  results: list[Any] = [None] * len(leaves)
  for at in _buckets(leaves).values():
    buffer = _side_by_side([_rows(leaves[i], count) for i in at])
    part = _scatter(buffer, names)
    if mean:
      part = part / jnp.asarray(count, part.dtype)
    for i, x in zip(
      at,
      _apart(part, [length(leaves[i].shape, count) for i in at], numbers),
      strict=True,
    ):
      results[i] = x
  return results


def all_gather(
  parts: Sequence[jax.Array],
  like: Sequence[jax.Array],
  names: Names,
  count: int,
  numbers: list[jax.Array],
) -> list[jax.Array]:
  """Returns the whole leaves from their parts, equal on all replicas.

  Args:
    parts: flat arrays, as :func:`reduce_scatter` returns them.
    like: arrays of the shapes and the shardings of the leaves.
    names: the bound axes over the replicas.
    count: the number of replicas.
    numbers: the leaves' offsets, see :func:`numbers_of`.

  Returns:
    Arrays of these shapes, with one all-gather per dtype.
  """
  parts = [axes.cast_to_varying(x, names) for x in parts]
  shapes = [x.shape for x in like]
  gather = functools.partial(_all_gather, shapes, names, count)
  return axes.in_auto(gather, list(like), parts, numbers)


def _all_gather(
  shapes: Sequence[Sequence[int]],
  names: Names,
  count: int,
  parts: list[jax.Array],
  numbers: list[jax.Array],
) -> list[jax.Array]:
  results: list[Any] = [None] * len(parts)
  for at in _buckets(parts).values():
    together = _side_by_side([parts[i] for i in at])
    gathered = collectives.gather_rows(together, names)
    gathered = gathered.reshape(count, together.size)
    for i, x in zip(
      at, _apart(gathered, [parts[i].size for i in at], numbers), strict=True
    ):
      results[i] = whole(x, shapes[i])
  return results


def _buckets(leaves: Sequence[jax.Array]) -> dict[Any, list[int]]:
  """Groups leaves that share a buffer: equal dtypes and types."""
  buckets: dict[Any, list[int]] = {}
  for i, x in enumerate(leaves):
    buckets.setdefault((x.dtype, axes.varying_axes(x)), []).append(i)
  return buckets


def _side_by_side(xs: list[jax.Array]) -> jax.Array:
  """Concatenates arrays along their last axis, those of one length as a block.

  Arrays of one length are stacked along a first axis and transposed together:
  concatenating many along their last axis takes CPU compilers minutes.
  """
  blocks = []
  for at in _by_length([x.shape[-1] for x in xs]):
    block = jnp.stack([xs[i] for i in at], axis=0)
    block = jnp.moveaxis(block, 0, -2)
    size = len(at) * block.shape[-1]
    blocks.append(block.reshape(*block.shape[:-2], size))
  return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=-1)


def _apart(
  x: jax.Array, lengths: list[int], numbers: list[jax.Array]
) -> list[jax.Array]:
  """Undoes :func:`_side_by_side`."""
  results: list[Any] = [None] * len(lengths)
  start = 0
  on_cpu = bool(numbers)
  for at in _by_length(lengths):
    end = start + len(at) * lengths[at[0]]
    block = jax.lax.slice_in_dim(x, start, end, axis=-1)
    block = block.reshape(*x.shape[:-1], len(at), lengths[at[0]])
    block = jnp.moveaxis(block, -2, 0)
    for number, i in enumerate(at):
      results[i] = (
        jax.lax.dynamic_index_in_dim(
          block,
          numbers[number],
          keepdims=False,
          allow_negative_indices=False,
        )
        if on_cpu
        else block[number]
      )
    start = end
  return results


def _by_length(lengths: list[int]) -> list[list[int]]:
  """Groups positions of equal lengths, in order of their first."""
  groups: dict[int, list[int]] = {}
  for i, each in enumerate(lengths):
    groups.setdefault(each, []).append(i)
  return list(groups.values())


def _scatter(buffer: jax.Array, names: Names) -> jax.Array:
  on_mesh = axes.mesh_axes()
  if len(names) == 1 or on_mesh.issuperset(names):
    name = names if len(names) > 1 else names[0]
    return jax.lax.psum_scatter(buffer, name)
  (total,) = collectives.sum_leaves([buffer], [names])
  index = jax.lax.axis_index(names)
  return jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
