"""The replicas of a transform: their number, their states, and decisions.

A user calls ``init`` inside or outside of the map, on any mesh, and each replica's part
of the state is created on its own devices. Inside ``update`` a transform is written for
one replica, as in its paper: blocks with a leading axis of size 1 under
``jax.shard_map``, and the axes of a sharded model that must agree on a decision, are
handled here.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist._internal import axes, checks, collectives
from optax_dist._internal.indexed_slices import is_indexed_slices, values_of
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.random_keys import fold_in, is_key
from optax_dist._internal.placement.replica_blocks import (
  PASS_STATE,
  PerReplica,
  as_block,
  own_block,
)


@dataclasses.dataclass(frozen=True)
class Replicas:
  """The replicas of a transform.

  Attributes:
    transform_name: the transform, for messages.
    names: names of the axes over the replicas.
    number: their number; None for the size of the axes.
    model_axes: further axes, over which each replica's parameters are sharded; None for
      the axes that types show.
    argument: the transform's name for the number.
  """

  transform_name: str
  names: tuple[axes.AxisName, ...]
  number: int | None
  model_axes: tuple[axes.AxisName, ...] | None
  argument: str = "num_replicas"

  @classmethod
  def of(
    cls,
    transform_name: str,
    axis_name: axes.AxisNames,
    number: Any,
    model_axes: axes.AxisNames | None,
    argument: str = "num_replicas",
  ) -> "Replicas":
    """Checks the arguments of the transform.

    Raises:
      ValueError: if they are not axis names and a positive integer or None, or
        if the replicas and the model share an axis.
    """
    names = axes.canonical_names(axis_name)
    sharded: tuple[axes.AxisName, ...] | None = None
    if model_axes is not None:
      none = isinstance(model_axes, list | tuple) and not model_axes
      sharded = () if none else axes.canonical_names(model_axes, "model_axes")
    both = set(names) & set(sharded or ())
    if both:
      raise ValueError(
        f"{transform_name}: the replicas lie along {sorted(map(str, both))}, so these"
        " can't be `model_axes` too."
      )
    number = checks.count_or_none(argument, number)
    return cls(transform_name, names, number, sharded, argument)

  def in_update(self) -> int:
    """Returns their number along the bound axes.

    Raises:
      UnboundAxisError: if an axis is not bound.
      ValueError: if the number differs from that of the transform.
    """
    return self._count(axes.check_bound(self.names, self.transform_name))

  def at_init(self) -> int:
    """Returns their number when ``init`` is called, in a map or not.

    Raises:
      ValueError: if it is unknown, or contradicts that of the transform.
    """
    if axes.bound_axes().keys() & set(self.names):
      return self.in_update()
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    if sizes.keys() >= set(self.names):
      return self._count(sizes)
    if self.number is None:
      raise ValueError(
        f"{self.transform_name}: the number of replicas is not known in `init`. Give"
        f" `{self.argument}`, or call init inside the map or under jax.set_mesh."
      )
    return self.number

  def _count(self, sizes: dict[axes.AxisName, int]) -> int:
    count = math.prod(sizes[name] for name in self.names)
    if self.number not in (None, count):
      raise ValueError(
        f"{self.transform_name}: `{self.argument}` is {self.number}, but there are"
        f" {count} replicas along {self.names!r}. Leave it out to use the size of the"
        " axis."
      )
    return count

  def start(self, own: Any, count: int) -> PerReplica:
    """Returns the replicas' part of a state, each starting from ``own``.

    Inside the map a replica creates only its own block. Outside of it, under
    ``jax.set_mesh`` or if ``own`` is on a mesh already, each replica's block is
    created on its own devices. Random keys are made different: replicas must not
    draw the same noise.

    Args:
      own: the state of one replica.
      count: the number of replicas.
    """
    own = jax.tree.map(jnp.asarray, own)
    if axes.bound_axes().keys() >= set(self.names):
      index = jax.lax.axis_index(self.names)
      blocks = jax.tree.map(lambda x: _of_replica(x, index)[None], own)
      return PerReplica(axes.cast_to_varying(blocks, self.names))

    mesh = _mesh(own, self.names)

    def stack(own):
      blocks = jax.tree.map(lambda x: _of_replicas(x, count), own)
      if mesh is None:
        return blocks
      return jax.tree.map(
        lambda x: _on_own_devices(x, mesh, self.names), blocks
      )

    return PerReplica(jax.jit(stack)(own))

  def validate_and_enter(
    self, node: PerReplica, counter: jax.Array
  ) -> "Replica":
    """Returns a replica inside ``update``.

    Args:
      node: the replicas' part of the state, including a ``local_step``.
      counter: the counter that decides when to communicate.

    Raises:
      UnboundAxisError: if an axis is not bound.
      ValueError: if the number of replicas differs, if the counter may differ
        between replicas, or if the block is not a single replica's.
    """
    size = self.in_update()
    axes.check_bound(self.model_axes or (), self.transform_name)
    self.check_counter(counter)
    own, leading = own_block(node, node.value.local_step, self.transform_name)
    return Replica(self, size, own, leading, axes.varying_axes(counter))

  def check_counter(self, counter: Any) -> None:
    """Checks that a counter that decides on communication is equal everywhere.

    Raises:
      ValueError: if its type says that it varies over one of the axes, or if it
        is not a scalar.
    """
    if axes.varying_axes(counter) & set(self.names):
      raise ValueError(
        f"{self.transform_name}: the state's counters vary over axis {self.names!r}, so"
        f" replicas could disagree on when to communicate. {PASS_STATE}"
      )
    if jnp.ndim(counter):
      raise ValueError(
        f"{self.transform_name}: the state's counters have shape {jnp.shape(counter)},"
        f" which must be (). {PASS_STATE}"
      )


@dataclasses.dataclass(frozen=True)
class Replica:
  """One replica inside ``update``.

  Attributes:
    of: the replicas of the transform.
    size: the number of replicas.
    own: the state of this replica.
    leading: whether its arrays are blocks with a leading axis of size 1.
    outer_axes: tracked axes over which decisions may differ, because they belong
      to a transform around this one.
  """

  of: Replicas
  size: int
  own: Any
  leading: bool
  outer_axes: frozenset[axes.AxisName]

  def as_state(self, own: Any) -> PerReplica:
    """Returns the replica's part of the new state."""
    return as_block(axes.cast_to_varying(own, self.of.names), self.leading)

  def sum(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums each array over the replicas."""
    return collectives.sum_leaves(leaves, [self.of.names] * len(leaves))

  def agree(self, flag: jax.Array, like: Any = ()) -> jax.Array:
    """Whether ``flag`` is true on all shards of this replica's model.

    Args:
      flag: a boolean scalar.
      like: a pytree of arrays; with tracked axes, those over which they vary
        are included, besides ``model_axes``.

    Raises:
      ValueError: if the axes over which the model is sharded can't be determined.
    """
    self._check_model_axes()
    over = axes.all_varying_axes((flag, dense_values(like)))
    over = over.union(self.of.model_axes or ())
    names = tuple(sorted(over - set(self.of.names) - self.outer_axes, key=str))
    if not names:
      return flag
    against = axes.cast_to_varying((~flag).astype(jnp.int32), names)
    return collectives.sum_leaves([against], [names])[0] == 0

  def _check_model_axes(self) -> None:
    """Raises an error where neither types nor the caller tell the model axes."""
    unknown = {
      name
      for name in axes.mesh_axes() - set(self.of.names)
      if jax.lax.axis_size(name) > 1 and not axes.is_tracked(name)
    }
    if self.of.model_axes is None and unknown:
      raise ValueError(
        f"{self.of.transform_name}: JAX does not track here (check_vma=False) whether a"
        f" replica's parameters are sharded over axis {axes.listed(unknown)}, and"
        " all shards must make the same decision. Give `model_axes`: these axes"
        " if they are, and () if not."
      )

  def all_finite(self, tree: Any) -> jax.Array:
    """Whether every element is finite, on all shards of this replica."""
    flags = [jnp.all(jnp.isfinite(x)) for x in dense_values(tree)]
    varying = axes.all_varying_axes(flags)
    yes = functools.reduce(
      jnp.logical_and,
      axes.cast_to_varying(flags, varying),
      jnp.asarray(True),
    )
    return materialize(self.agree(yes, tree))

  def finite_or_zero(
    self, gaps: list[jax.Array], reject: bool
  ) -> tuple[list[jax.Array], jax.Array]:
    """Returns how far this replica is from a center, where it may move nothing.

    Args:
      gaps: the distances of the replica's parameters.
      reject: whether a replica that is not finite counts as being at the center.

    Returns:
      The distances, or zeros; and a boolean scalar: whether they are its own.
    """
    if not reject:
      return gaps, jnp.asarray(True)
    finite = self.all_finite(gaps)
    return [jnp.where(finite, x, jnp.zeros_like(x)) for x in gaps], finite


def dense_values(tree: Any) -> list:
  """Returns the arrays of a tree of gradients; for a sparse one, its values."""
  leaves = jax.tree.leaves(tree, is_leaf=is_indexed_slices)
  return [values_of(x) for x in leaves]


def _mesh(own: Any, names: tuple[axes.AxisName, ...]) -> Any:
  """Returns the mesh of ``jax.set_mesh``, or of the arrays, that has ``names``."""
  arrays = [
    x for x in jax.tree.leaves(own) if not isinstance(x, jax.core.Tracer)
  ]
  shardings = [x.sharding for x in arrays]
  meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
  for mesh in (jax.sharding.get_abstract_mesh(), *meshes):
    if set(names) <= set(mesh.axis_names):
      return mesh
  return None


def _of_replica(x: jax.Array, index: Any) -> jax.Array:
  return fold_in(x, index) if is_key(x) else x


def _of_replicas(x: jax.Array, count: int) -> jax.Array:
  if is_key(x):
    return jnp.stack([_of_replica(x, i) for i in range(count)])
  return jnp.broadcast_to(x[None], (count, *x.shape))


def _on_own_devices(
  x: jax.Array, mesh: Any, names: tuple[axes.AxisName, ...]
) -> jax.Array:
  """Puts each row on the devices of its replica, sharded there as it is."""
  first = names if len(names) > 1 else names[0]
  if set(names) <= set(mesh.explicit_axes):
    rest = [
      None if set(names) & set(axes.names_in([entry])) else entry
      for entry in axes.sharding_of(x).spec[1:]
    ]
    return jax.sharding.reshard(
      x, NamedSharding(mesh, PartitionSpec(first, *rest))
    )
  free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
  to = NamedSharding(mesh, PartitionSpec(first, *free))
  return jax.lax.with_sharding_constraint(x, to)
