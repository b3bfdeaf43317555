"""Replicas that train their own parameters: which take part, and their center."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, collectives
from optax_dist._internal.indexed_slices import values_of
from optax_dist._internal.inner import checked
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.placement.replica_blocks import has_center
from optax_dist._internal.replicas import Replica, Replicas

_NO_REPLICAS = (
  "Under plain jax.jit there is one set of parameters, and no replica that trains"
  " its own: map the step over a leading replica axis of the parameters."
)


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
    """Returns the leaves that are also among ``indices``."""
    others = set(indices)
    return Leaves(self.treedef, [i for i in self.at if i in others])

  def put(self, tree: Any, leaves: Iterable) -> Any:
    """Returns ``tree`` with these leaves replaced."""
    new = self.treedef.flatten_up_to(tree)
    for i, leaf in zip(self.at, leaves, strict=True):
      new[i] = leaf
    return self.treedef.unflatten(new)


@dataclasses.dataclass(frozen=True)
class Trainers:
  """Replicas that train their own parameters around a center.

  Attributes:
    replicas: the replicas of the transform.
    inner: the transformation that updates each replica's parameters.
    center_dtype: dtype of the center, see :func:`common`.
  """

  replicas: Replicas
  inner: optax.GradientTransformationExtraArgs
  center_dtype: Any

  @classmethod
  def of(
    cls,
    transform_name: str,
    inner: optax.GradientTransformation,
    axis_name: axes.AxisNames,
    num_replicas: Any,
    center_dtype: Any,
    model_axes: axes.AxisNames | None,
  ) -> "Trainers":
    """Checks the arguments of the transform.

    Raises:
      ValueError: if one is invalid.
    """
    replicas = Replicas.of(transform_name, axis_name, num_replicas, model_axes)
    precision.check_dtype("center_dtype", center_dtype)
    inner = checked(transform_name, inner, replicas.names)
    return cls(replicas, inner, center_dtype)

  def init(self, params: Any) -> tuple[int, Any, Any]:
    """Returns the number of replicas, their center, and one's inner state.

    Raises:
      ValueError: if the number is unknown; or if ``inner`` has a center too: there
        would be two sets of replicas, and the center of the outer ones would differ
        between the inner ones.
    """
    size = self.replicas.at_init()
    params = strong(params)
    inner_state = self.inner.init(params)
    if has_center(inner_state):
      raise ValueError(
        f"{self.replicas.transform_name}: `inner` has a center of its own, as that of"
        " elastic_average or local_updates, but they can't be nested. Give one of"
        " them both axes, axis_name=('outer', 'inner'); or use cross_shard,"
        " sync_replicas or sharded over the inner axis."
      )
    center = common(params, self.replicas.names, self.center_dtype)
    return size, center, inner_state

  def validate_and_enter(
    self, state: Any, params: Any, updates: Any
  ) -> tuple[Replica, Leaves]:
    """Returns a replica with its own parameters, inside ``update``.

    Args:
      state: the transform's state, with the fields ``iterations``, ``center`` and
        ``replica``.
      params: this replica's parameters.
      updates: their gradients, with None for parameters that don't take part.

    Returns:
      The replica, and the leaves of the parameters that take part.

    Raises:
      UnboundAxisError, ValueError: as in :meth:`Replicas.validate_and_enter`; if
        there are no parameters, if an update has no parameter, if a parameter is,
        by its type, equal on all replicas, or if a center has another shape.
      TypeError: if an update is not floating-point or complex.
    """
    of = self.replicas
    axes.check_bound(of.names, of.transform_name, _NO_REPLICAS)
    of.check_counter(state.iterations)
    if params is None and updates is not None:
      raise ValueError(
        f"{of.transform_name} needs the parameters: call"
        " update(updates, state, params)."
      )
    gradients = update_leaves.check_like(of.transform_name, updates, params)
    treedef: Any
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    centers = treedef.flatten_up_to(state.center)
    for (path, x), gradient, center in zip(
      paths_and_leaves, gradients, centers, strict=True
    ):
      _check_leaf(of, path, x, gradient, center)
    at = [i for i, g in enumerate(gradients) if g is not None]
    me = of.validate_and_enter(state.replica, state.iterations)
    return me, Leaves(treedef, at)


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
  is_first = jax.lax.axis_index(names) == 0
  numbers = []
  for i, x in enumerate(leaves):
    if tracked and not axes.varying_axes(x) & set(names):
      continue
    if jnp.issubdtype(x.dtype, jnp.number):
      numbers.append(i)
    else:
      # Booleans and random keys can't be summed, so they are gathered.
      leaves[i] = collectives.gather_rows(x[None], names)[0]
  # "where" instead of a product with 0, since other replicas may hold NaN.
  firsts = [
    jnp.where(is_first, leaves[i], jnp.zeros_like(leaves[i])) for i in numbers
  ]
  for i, x in zip(
    numbers, collectives.sum_leaves(firsts, [names] * len(firsts)), strict=True
  ):
    leaves[i] = x
  return treedef.unflatten(leaves)


def _check_leaf(
  of: Replicas, path: Any, x: Any, gradient: Any, center: Any
) -> None:
  """Checks a parameter, with its gradient or None, and its center."""
  name = f"params{jax.tree_util.keystr(path)}"
  gradient = values_of(gradient)
  if gradient is not None:
    update_leaves.check_dtype(of.transform_name, path, gradient)
  missing = axes.tracked_axes(of.names) - axes.varying_axes(x)
  if missing:
    raise ValueError(
      f"{of.transform_name}: {name} does not vary over axis {axes.listed(missing)}: it"
      " is one parameter of all replicas, but each must have its own. Give the"
      " parameters a leading replica axis and pass them with"
      " in_specs=PartitionSpec(axis_name),"
      " or, where they start out equal inside the map, cast them with"
      " optax_dist.local_params(params, axis_name)."
    )
  if jnp.shape(x) != jnp.shape(center):
    raise ValueError(
      f"{of.transform_name}: {name} has shape {jnp.shape(x)}, but the center has"
      f" {jnp.shape(center)}. Pass one replica's parameters: inside jax.shard_map,"
      " take its block's only row, as in jax.tree.map(lambda x: x[0], params)."
    )
