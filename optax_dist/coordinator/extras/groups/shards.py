"""One process's part of arrays that are sharded over several processes.

Every process exchanges the distinct shards that its own devices hold, as if they were
small arrays; it never gets the shards of other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist.coordinator._internal.fingerprints import words_of

# A shard's position: start and stop in each dimension.
_Index = tuple[tuple[int, int], ...]


class _Leaf(NamedTuple):
  """How one array is sharded.

  Attributes:
    shape: shape of the whole array; for a random key, that of its words.
    sharding: sharding of the same.
    key: the implementation of a random key; None for other arrays.
    indices: distinct shards on this process's devices, in order.
    on: for each of these devices, the shard it holds.
  """

  shape: tuple[int, ...]
  sharding: Any
  key: Any
  indices: tuple[_Index, ...]
  on: tuple[tuple[Any, int], ...]


class LocalShards:
  """Splits sharded arrays into this process's shards, and joins them again.

  Attributes:
    templates: shapes and dtypes of the shards, as `jax.ShapeDtypeStruct`s.

  Example:
    >>> shards = LocalShards([jnp.arange(6.0)])
    >>> [shard.shape for shard in shards.templates]
    [(6,)]
    >>> shards.join(shards.split([jnp.ones(6)]))
    [Array([1., 1., 1., 1., 1., 1.], dtype=float32)]
  """

  def __init__(self, leaves: Sequence[jax.Array]):
    """Records the shardings; `split` and `join` expect arrays sharded alike."""
    self._leaves = [_look_at(leaf) for leaf in leaves]
    self.templates = [
      jax.ShapeDtypeStruct(shard.shape, shard.dtype)
      for shard in self.split(leaves)
    ]

  def split(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The distinct shards of this process, array by array."""
    parts: list[jax.Array] = []
    for like, leaf in zip(self._leaves, leaves, strict=True):
      data, _ = words_of(leaf)
      shards = {
        _index(shard.index, like.shape): shard.data
        for shard in data.addressable_shards
      }
      parts += [shards[index] for index in like.indices]
    return parts

  def join(self, shards: Sequence[np.ndarray]) -> list[jax.Array]:
    """Whole arrays, from the shards that this process holds.

    Shards may have another dtype than the arrays that were split; NumPy memory
    is copied.
    """
    whole: list[jax.Array] = []
    first = 0
    for like in self._leaves:
      mine = shards[first : first + len(like.indices)]
      first += len(like.indices)
      arrays = [jax.device_put(mine[i].copy(), device) for device, i in like.on]
      array = jax.make_array_from_single_device_arrays(
        like.shape, like.sharding, arrays
      )
      if like.key is not None:
        array = jax.random.wrap_key_data(array, impl=like.key)
      whole.append(array)
    return whole


def _look_at(leaf: jax.Array) -> _Leaf:
  leaf, key = words_of(leaf)
  where = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  by_device = {d: _index(i or (), leaf.shape) for d, i in where.items()}
  indices = tuple(sorted(set(by_device.values())))
  on = tuple((d, indices.index(i)) for d, i in by_device.items())
  return _Leaf(leaf.shape, leaf.sharding, key, indices, on)


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Index:
  return tuple(
    s.indices(size)[:2] for s, size in zip(index, shape, strict=True)
  )


def spread(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """Replicates arrays of this process's devices over all devices of the mesh.

  For example an optimizer's counters, which each process created for itself.
  """

  def replicated(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      return leaf
    words, key = words_of(jnp.asarray(leaf))
    value = np.asarray(words)
    array = jax.make_array_from_callback(
      value.shape,
      NamedSharding(mesh, PartitionSpec()),
      lambda index: value[index],
    )
    return array if key is None else jax.random.wrap_key_data(array, impl=key)

  return jax.tree.map(replicated, tree)


def mesh_of(params: Any) -> jax.sharding.Mesh:
  """The mesh of parameters that are sharded over all processes.

  Raises:
    ValueError: a parameter has another kind of sharding, is on another mesh, or
      is not on all processes' devices; the message names it.
  """
  first: jax.sharding.Mesh | None = None
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = f"params{jax.tree_util.keystr(path)}"
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
      raise ValueError(
        f"{name} must have a NamedSharding, over the devices of all processes"
        f" of the replica, got {sharding}. Make it with jax.device_put(x,"
        " NamedSharding(mesh, spec)), where mesh has all of jax.devices()."
      )
    mesh = sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    if first is None:
      first = mesh
      processes = {d.process_index for d in mesh.devices.flat}
      if len(processes) != jax.process_count():
        raise ValueError(
          f"{name} must be on devices of all {jax.process_count()} processes of"
          f" the replica, got a mesh of processes {sorted(processes)}."
        )
    elif mesh != first:
      raise ValueError(
        f"{name} must be on the same mesh as the other parameters, {first},"
        f" got {mesh}."
      )
  assert first is not None
  return first


def agreement(params: Any) -> tuple[tuple[str, str], ...]:
  """Properties on which replicas must agree so that their shards match, by name."""
  mesh = mesh_of(params)
  where = [int(d.process_index) for d in mesh.devices.flat]
  pairs = [("mesh", f"{dict(mesh.shape)} over processes {where}")]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    spec = list(leaf.sharding.spec)
    while spec and spec[-1] is None:
      spec.pop()
    name = f"sharding of params{jax.tree_util.keystr(path)}"
    pairs.append((name, str(PartitionSpec(*spec))))
  return tuple(pairs)
