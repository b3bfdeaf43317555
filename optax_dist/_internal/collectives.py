"""Sums over named axes, equal on all replicas in every map.

See :mod:`optax_dist._internal.leaves.packing` for leaves that share a message.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves import packing

Groups = Sequence[Sequence[int]]

# Bytes of a TPU tile of one-dimensional arrays.
_TILE = 512


def check_groups(groups: Groups | None) -> None:
  """Checks groups of axis indices as far as possible without the axis.

  Args:
    groups: the groups, as a list of lists of integers; None or ``[]`` for none.

  Raises:
    ValueError: if ``groups`` is not a list of lists of integers, if the groups
      differ in size, or if they are not a permutation of ``range(n)``.
  """
  if groups is None:
    return
  is_list = isinstance(groups, list) and all(
    isinstance(g, list) for g in groups
  )
  if not is_list or not all(type(i) is int for g in groups for i in g):
    raise ValueError(
      "`axis_index_groups` must be a list of lists of integers, got"
      f" {groups!r}."
    )
  sizes = {len(group) for group in groups}
  if len(sizes) > 1:
    raise ValueError(
      "The groups in `axis_index_groups` must be equal in size, got"
      f" {groups!r}."
    )
  if groups:
    check_partition(groups, max(1, sum(map(len, groups))))


def check_partition(groups: Groups, size: int) -> None:
  """Checks that ``groups`` partition an axis of ``size``.

  Raises:
    ValueError: if they are not a permutation of ``range(size)``.
  """
  if sorted(i for group in groups for i in group) != list(range(size)):
    raise ValueError(
      "`axis_index_groups` must be a permutation of the axis's indices, of"
      f" range({size}), got {groups!r}."
    )


def sum_leaves(
  leaves: Sequence[jax.Array],
  names: Sequence[tuple[axes.AxisName, ...]],
  groups: Groups | None = None,
) -> list[jax.Array]:
  """Sums each leaf over its own axes, in as few collectives as is fast.

  Args:
    leaves: arrays of any shapes and dtypes.
    names: for each leaf the bound axes to sum over; an empty tuple for a leaf
      to leave unchanged.
    groups: groups of indices, for leaves with a single axis to sum over: the
      sum is over the replica's own group instead of the whole axis.

  Raises:
    NotImplementedError: for an axis of ``jax.vmap`` inside a ``jax.shard_map``
      with ``check_vma=True``, where JAX has no collectives.

  Returns:
    The sums, each in its leaf's shape and dtype. They are bit-identical on all
    replicas of the sum.
  """
  totals = list(leaves)
  sent = list(names)
  for i, x in enumerate(leaves):
    if sent[i] and not x.size:
      # JAX 0.11 crashes when it compiles an all-reduce beside an empty argument.
      varying = axes.varying_axes(x) - frozenset(() if groups else sent[i])
      totals[i] = axes.cast_to_varying(axes.zeros(jax.typeof(x)), varying)
      sent[i] = ()
  for at in packing.together(leaves, sent):
    over = sent[at[0]]
    if over:
      add_up = _group_sum(over[0], groups) if groups else _axis_sum(over)
      if len(at) == 1:
        totals[at[0]] = add_up(leaves[at[0]])
        continue
      total = add_up(jnp.concatenate([jnp.ravel(leaves[i]) for i in at]))
      ends = itertools.accumulate(leaves[i].size for i in at)
      sums = jnp.split(total, [*ends][:-1])
      for i, x in zip(at, sums, strict=True):
        totals[i] = x.reshape(leaves[i].shape)
  return totals


def gather_rows(
  x: jax.Array,
  names: tuple[axes.AxisName, ...],
  groups: Groups | None = None,
  axis: int = 0,
) -> jax.Array:
  """Concatenates the rows of all replicas, in replica order.

  Args:
    x: an array of shape ``[rows, ...]``, of the same shape on each replica.
    names: the bound axes over the replicas.
    groups: groups of indices along the (single) axis: only rows of the
      replica's own group are gathered, in the group's order.
    axis: the axis of ``x`` along which its rows lie; 0 with groups.

  Returns:
    An array of shape ``[replicas * rows, ...]``, equal on all replicas that
    gathered from each other.
  """
  if not x.size:
    return _empty_rows(x, names, groups, axis)
  if groups:
    return _gather_group(x, names[0], groups)
  batched, _ = _split(names)
  # JAX can't gather over axes of vmap and of the mesh at once.
  for over in [(name,) for name in reversed(names)] if batched else [names]:
    # Equal everywhere, and typed so: the results are replicated values.
    tracked = any(axes.is_tracked(name) for name in over)
    to = "invarying" if tracked else "varying"
    x = jax.lax.all_gather(x, over, axis=axis, tiled=True, to=to)
  return x


def _empty_rows(
  x: jax.Array,
  names: tuple[axes.AxisName, ...],
  groups: Groups | None,
  axis: int,
) -> jax.Array:
  """Gathers arrays without elements, for which compilers have no all-gather."""
  shape = list(x.shape)
  shape[axis] *= len(groups[0]) if groups else jax.lax.axis_size(names)
  varying = axes.varying_axes(x) - frozenset(() if groups else names)
  return axes.cast_to_varying(jnp.zeros(shape, x.dtype), varying)


def _gather_group(x: jax.Array, name: axes.AxisName, groups: Groups):
  if name in axes.mesh_axes():
    return jax.lax.all_gather(x, name, axis_index_groups=groups, tiled=True)
  rows = jax.lax.all_gather(x, name)[_peers(name, groups)]
  return jnp.reshape(rows, (-1, *x.shape[1:]))


def gather_replicas(
  x: jax.Array, names: tuple[axes.AxisName, ...]
) -> jax.Array:
  """Returns the arrays of all replicas as rows, equal on all replicas.

  Args:
    x: this replica's array.
    names: names of the axes over the replicas, the first one outermost.
  """
  # A one-dimensional array is flattened; others keep their axes, which may be
  # sharded.
  rows = x if x.ndim == 1 else x[None]
  if x.ndim == 1 and axes.platform() == "tpu":
    # Padded to whole tiles: for other sizes the TPU compiler uses an all-reduce with
    # zeros, which moves twice the bytes.
    rows = jnp.pad(x, (0, -x.size % (_TILE // x.dtype.itemsize)))
  every = gather_rows(rows, names)
  if x.ndim != 1:
    return every
  return every.reshape(jax.lax.axis_size(names), -1)[:, : x.size]


def sum_counted(
  arrays: Sequence[jax.Array],
  counts: jax.Array,
  names: tuple[axes.AxisName, ...],
) -> tuple[list[jax.Array], jax.Array]:
  """Returns sums over the replicas that count, and their number (float32 scalar).

  Args:
    arrays: this replica's floating-point or complex arrays.
    counts: whether it counts (boolean scalar). What does not may be NaN.
    names: the bound axes over the replicas.
  """
  sent = [jnp.where(counts, x, jnp.zeros_like(x)) for x in arrays]
  sent = axes.cast_to_varying([*sent, counts.astype(jnp.float32)], names)
  *sums, number = sum_leaves(sent, [names] * len(sent))
  return sums, number


def can_sum(dtype: jnp.dtype) -> bool:
  """Whether XLA compiles an all-reduce of a dtype over mesh axes bound here.

  For CPUs it aborts the process where the mesh also has an axis that is not mapped.
  """
  mesh = jax.sharding.get_abstract_mesh()
  whole = set(mesh.manual_axes) in (set(), set(mesh.axis_names))
  return whole or dtype != jnp.bfloat16 or axes.platform() != "cpu"


def compiled_sum(
  add_up: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Returns ``add_up(x)``, a sum over mesh axes, in a dtype that XLA compiles."""
  if can_sum(x.dtype):
    return add_up(x)
  # XLA for CPUs adds bfloat16 numbers up in float32 anyway.
  return add_up(x.astype(jnp.float32)).astype(x.dtype)


def _axis_sum(over: tuple[axes.AxisName, ...]):
  batched, spread = _split(over)

  def axis_sum(x):
    if batched and axes.sharding_of(x).mesh.explicit_axes:
      # Under jit, JAX 0.11 can't psum such an array over an axis of vmap.
      for name in batched:
        x = jax.lax.reduce_sum(jax.lax.all_gather(x, name), [0])
    elif batched:
      x = jax.lax.psum(x, batched)
    add_up = lambda x: jax.lax.psum(x, spread)
    return compiled_sum(add_up, x) if spread else x

  return axis_sum


def _split(names: tuple[axes.AxisName, ...]):
  # Axes of vmap are summed first: that moves nothing, and leaves less to move. JAX
  # rejects a psum over both tracked and untracked axes anyway.
  on_mesh = axes.mesh_axes()
  batched = tuple(name for name in names if name not in on_mesh)
  _check_vmap_collectives(batched)
  return batched, tuple(name for name in names if name in on_mesh)


def _check_vmap_collectives(batched: tuple[axes.AxisName, ...]) -> None:
  # JAX fails here with a bare AssertionError, in every collective.
  if batched and any(axes.is_tracked(name) for name in axes.mesh_axes()):
    raise NotImplementedError(
      f"JAX has no collectives over an axis of jax.vmap ({batched[0]!r}) inside"
      " jax.shard_map with check_vma=True. Pass check_vma=False to that"
      " shard_map, or make the axis one of its mesh."
    )


def _group_sum(name: axes.AxisName, groups: Groups):
  """Returns the sum over the replica's group, by the method for this map."""
  if name not in axes.mesh_axes():
    _check_vmap_collectives((name,))
    return lambda x: _sum_of_gathered(x, name, groups)
  if axes.is_tracked(name):
    by_scatter = lambda x: _sum_by_scatter(x, name, groups)
    add_up = lambda x: axes.in_auto(by_scatter, x, x)
  else:
    add_up = lambda x: jax.lax.psum(x, name, axis_index_groups=groups)
  return lambda x: compiled_sum(add_up, x)


def _sum_of_gathered(x: jax.Array, name: axes.AxisName, groups: Groups):
  """For vmap: collectives have no groups, and a gather moves nothing."""
  rows = jax.lax.all_gather(x, name)[_peers(name, groups)]
  return jnp.sum(rows, axis=0, dtype=x.dtype)


def _peers(name: axes.AxisName, groups: Groups) -> jax.Array:
  """Returns the indices of this replica's group."""
  peers: list[Sequence[int]] = [[]] * jax.lax.axis_size(name)
  for group in groups:
    for i in group:
      peers[i] = group
  return jnp.asarray(peers)[jax.lax.axis_index(name)]


def _sum_by_scatter(x: jax.Array, name: axes.AxisName, groups: Groups):
  """Under check_vma, psum rejects groups, but its two halves do not."""
  flat = jnp.ravel(x)
  size = len(groups[0])
  # Padded to at least one element each, since an empty array can't be scattered.
  flat = jnp.pad(flat, (0, -flat.size % size if flat.size else size))
  part = jax.lax.psum_scatter(flat, name, axis_index_groups=groups, tiled=True)
  total = jax.lax.all_gather(part, name, axis_index_groups=groups, tiled=True)
  return jnp.reshape(total[: math.prod(x.shape)], x.shape)
