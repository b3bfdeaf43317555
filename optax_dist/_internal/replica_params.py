"""A transform's view of its replicas: number, own block, parameters.

The transforms are written for one replica, as in their papers: scalars,
parameters, a center. Everything else is handled here, and only here: the number
of replicas, blocks with a leading axis of size 1 under ``jax.shard_map``, which
parameters take part, and which axes of a sharded model must agree on a
decision.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, checks, collectives, replicas
from optax_dist._internal.leaves import (
  precision,
  update_leaves,
)
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_blocks import (
  PerReplica,
  as_block,
  own_block,
)
from optax_dist.sparse.indexed_slices import is_indexed_slices, values_of

_NO_REPLICAS = (
  "Under plain jax.jit there is one set of parameters, and no replica that trains"
  " its own: map the step over a leading replica axis of the parameters."
)


@dataclasses.dataclass(frozen=True)
class Replicas:
  """The replicas of a transform.

  Attributes:
    user: the transform, for messages.
    names: names of the axes over the replicas.
    number: their number; None for the size of the axes.
    model_axes: further axes, over which each replica's parameters are sharded;
      None for those that types show.
    argument: the transform's name for the number.
  """

  user: str
  names: tuple[axes.AxisName, ...]
  number: int | None
  model_axes: tuple[axes.AxisName, ...] | None
  argument: str = "num_replicas"

  @classmethod
  def of(
    cls,
    user: str,
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
      none = model_axes in ((), [])
      sharded = () if none else axes.canonical_names(model_axes)
    both = set(names) & set(sharded or ())
    if both:
      raise ValueError(
        f"{user}: the replicas lie along {sorted(map(str, both))}, so these can't"
        " be `model_axes` too."
      )
    number = checks.count_or_none(argument, number)
    return cls(user, names, number, sharded, argument)

  def at_init(self) -> int:
    """Returns their number when ``init`` is called, see :mod:`replicas`."""
    return replicas.at_init(self.user, self.names, self.number, self.argument)

  def start(self, own: Any, size: int) -> PerReplica:
    """Returns the replicas' part of a state, each starting from ``own``."""
    return replicas.start(own, size, self.names)

  def enter_with_params(
    self, state: Any, params: Any, updates: Any
  ) -> tuple["Replica", "Leaves", list, list, list]:
    """Returns a replica with its own parameters, inside ``update``.

    Args:
      state: the transform's state, with the fields ``iterations``, ``center`` and
        ``replica``.
      params: this replica's parameters.
      updates: their gradients, with None for parameters that don't take part.

    Returns:
      The replica, the leaves of the parameters that take part, and lists of
      these, of their gradients and of their centers.

    Raises:
      UnboundAxisError, ValueError: as in :meth:`enter`; if there are no
        parameters, if an update has no parameter, if a parameter is, by its
        type, equal on all replicas, or if a center has another shape.
      TypeError: if an update is not floating-point or complex.
    """
    axes.check_bound(self.names, self.user, _NO_REPLICAS)
    replicas.check_counter(self.user, state.iterations, self.names)
    xs, gradients, treedef = _flatten_with_updates(self, params, updates)
    _check_center(self.user, params, state.center)
    at = [i for i, g in enumerate(gradients) if g is not None]
    leaves = Leaves(treedef, at)
    return (
      self.enter(state.replica, state.iterations),
      leaves,
      [xs[i] for i in at],
      [gradients[i] for i in at],
      leaves.of(state.center),
    )

  def enter(self, node: PerReplica, counter: jax.Array) -> "Replica":
    """Returns a replica inside ``update``.

    Args:
      node: the replicas' part of the state, including a ``local_step``.
      counter: the counter that decides when to communicate.

    Raises:
      UnboundAxisError: if an axis is not bound.
      ValueError: if the number of replicas differs, if the counter may differ
        between replicas, or if the block is not a single replica's.
    """
    size = replicas.in_update(self.user, self.names, self.number, self.argument)
    axes.check_bound(self.model_axes or (), self.user)
    replicas.check_counter(self.user, counter, self.names)
    own, leading = own_block(node, node.value.local_step, self.user)
    return Replica(self, size, own, leading, axes.varying_axes(counter))


@dataclasses.dataclass(frozen=True)
class Replica:
  """One replica inside ``update``.

  Attributes:
    of: the replicas of the transform.
    size: the number of replicas.
    own: the state of this replica.
    leading: whether its arrays are blocks with a leading axis of size 1.
    undecided: tracked axes over which decisions may differ, because they belong
      to a transform around this one.
  """

  of: Replicas
  size: int
  own: Any
  leading: bool
  undecided: frozenset[axes.AxisName]

  def leave(self, own: Any) -> PerReplica:
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
      ValueError: if it can't be told over which axes the model is sharded.
    """
    self._check_model_axes()
    over = axes.all_varying_axes((flag, dense_values(like)))
    over = over.union(self.of.model_axes or ())
    names = tuple(sorted(over - set(self.of.names) - self.undecided, key=str))
    if not names:
      return flag
    against = axes.cast_to_varying((~flag).astype(jnp.int32), names)
    return collectives.sum_leaves([against], [names])[0] == 0

  def _check_model_axes(self) -> None:
    """Raises an error where neither types nor the caller tell the model axes."""
    unknown = {
      name
      for name in axes.mesh_axes() - set(self.of.names)
      if axes.axes_size([name]) > 1 and not axes.is_tracked(name)
    }
    if self.of.model_axes is None and unknown:
      raise ValueError(
        f"{self.of.user}: JAX does not track here (check_vma=False) whether a"
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

  def where_finite(
    self, points: list, center: list, reject: bool
  ) -> tuple[list, jax.Array]:
    """Returns this replica's position, in the dtype of the center.

    Args:
      points: the replica's parameters.
      center: the center's parameters.
      reject: whether a replica with non-finite parameters counts as being at
        the center, where it moves nothing.

    Returns:
      The points, and a boolean scalar: whether they are the replica's own.
    """
    points = [cast_like(x, c) for x, c in zip(points, center, strict=True)]
    if not reject:
      return points, jnp.asarray(True)
    finite = self.all_finite(points)
    return [
      jnp.where(finite, x, c) for x, c in zip(points, center, strict=True)
    ], finite


@dataclasses.dataclass(frozen=True)
class Leaves:
  """Some of the leaves of trees like the parameters.

  Attributes:
    treedef: the structure of the parameters.
    at: the indices of these leaves.
  """

  treedef: Any
  at: list[int]

  def of(self, tree: Any) -> list:
    """Returns the list of these leaves."""
    leaves = self.treedef.flatten_up_to(tree)
    return [leaves[i] for i in self.at]

  def among(self, indices: Iterable[int]) -> "Leaves":
    """Returns those of these leaves that are also among ``indices``."""
    others = set(indices)
    return Leaves(self.treedef, [i for i in self.at if i in others])

  def put(self, tree: Any, leaves: Iterable) -> Any:
    """Returns ``tree`` with these leaves replaced."""
    new = self.treedef.flatten_up_to(tree)
    for i, leaf in zip(self.at, leaves, strict=True):
      new[i] = leaf
    return self.treedef.unflatten(new)


def dense_values(tree: Any) -> list:
  """Returns the arrays of a tree of gradients; for a sparse one, its values."""
  leaves = jax.tree.leaves(tree, is_leaf=is_indexed_slices)
  return [values_of(x) for x in leaves]


def dense(leaves: list) -> list:
  """Returns the leaves, with sparse ones converted to arrays."""
  return [x.to_dense() if is_indexed_slices(x) else x for x in leaves]


def strong(params: Any) -> Any:
  """Returns the parameters without weak types.

  Otherwise the first update would change the types.
  """
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)


def unmoved(center: Any) -> Any:
  """Returns a tree like the center of zeros: a step that moves nothing.

  Leaves that no step moves, such as integers and random keys, are None.
  """
  can_move = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
  return jax.tree.map(
    lambda x: jnp.zeros_like(x) if can_move(x) else None, center
  )


def common(
  params: Any, names: tuple[axes.AxisName, ...], dtype: Any = None
) -> Any:
  """Returns a copy of the first replica's parameters, equal on all replicas.

  Outside of a map, and if the type says that they are already equal, it is a
  copy of ``params``. It is a copy because it must not share a donated buffer.

  Args:
    params: a pytree of arrays.
    names: names of the axes over the replicas.
    dtype: dtype of the copy, see :func:`precision.wide_dtype`.
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(precision.widen(params, dtype))
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
  # With "where", since other replicas may hold NaN.
  firsts = [
    jnp.where(is_first, leaves[i], jnp.zeros_like(leaves[i])) for i in differs
  ]
  for i, x in zip(
    differs, collectives.sum_leaves(firsts, [names] * len(firsts)), strict=True
  ):
    leaves[i] = x
  return treedef.unflatten(leaves)


def _flatten_with_updates(
  of: Replicas, params: optax.Params | None, updates: optax.Updates
) -> tuple[list, list, Any]:
  if params is None and updates is not None:
    raise ValueError(
      f"{of.user} needs the parameters: call update(updates, state, params)."
    )
  leaves = update_leaves.check_like(of.user, updates, params)
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  for (path, _), update in zip(paths_and_leaves, leaves, strict=True):
    update = values_of(update)
    if update is not None:
      update_leaves.check_dtype(of.user, path, update)
  tracked = axes.tracked_axes(of.names)
  for path, leaf in paths_and_leaves:
    missing = tracked - axes.varying_axes(leaf)
    if missing:
      raise ValueError(
        f"{of.user}: params{jax.tree_util.keystr(path)} does not vary over axis"
        f" {axes.listed(missing)}: it is one parameter of all"
        " replicas, but each must have its own. Give the parameters a leading"
        " replica axis and pass them with in_specs=PartitionSpec(axis_name), or,"
        " where they start out equal inside the map, cast them with"
        " optax_dist.local_params(params, axis_name)."
      )
  return [leaf for _, leaf in paths_and_leaves], leaves, treedef


def _check_center(user: str, params: optax.Params, center: Any) -> None:
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
