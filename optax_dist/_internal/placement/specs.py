"""Sharding of states: which parts belong to one replica, and their specs."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_dist._internal import axes, checks
from optax_dist._internal.gradient_sum import SparseSum
from optax_dist._internal.indexed_slices import is_indexed_slices
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  PerShard,
  has_replicas,
  is_per_replica,
  nodes,
)

_Dims = tuple[Any, ...]


def state_specs(
  state: Any,
  axis_name: axes.AxisNames,
  *,
  inner_axes: Sequence[axes.AxisNames] = (),
  param_specs: Any = None,
  params: Any = None,
) -> Any:
  """Returns the PartitionSpecs of an optimizer state.

  They are valid ``in_specs`` and ``out_specs`` of ``jax.shard_map``, specs for
  :func:`optax_dist.states.place` and, under ``jax.set_mesh``, ``out_shardings`` of
  ``jax.jit(tx.init)``, which creates a state in its final sharding.

  With ``param_specs``, each array that mirrors a parameter (a momentum, a center, a
  sum of gradients) is sharded like that parameter, after the replica axis if it
  belongs to one replica. Such arrays are found as by ``optax.tree.map_params``: they
  are in a tree with the structure of the parameters, in which masked ones may be
  missing.

  Args:
    state: an optax state, or its ``jax.eval_shape``, that contains states of
      this library.
    axis_name: the mesh axis, or a sequence of axes, over the replicas.
    inner_axes: if a replica itself consists of replicas, as with
      ``sync_replicas`` inside ``diloco``: the axis, or axes, of the inner ones,
      one entry per level from the outside in. ``axis_name`` is the outermost.
    param_specs: a pytree like the parameters of ``PartitionSpec`` (of one
      replica's parameters, without the replica axis); None if the parameters
      are not sharded. The results of ``flax.linen.get_partition_spec(params)``
      and ``flax.nnx.get_partition_spec(state)`` can be used unchanged.
    params: the parameters, or their shapes. Required if the state has trees
      like the parameters but with arrays of other shapes, such as the factors
      of Adafactor, which then count as not sharded; and if ``param_specs`` is
      only a prefix of the parameters' structure.

  Returns:
    A pytree like ``state``: ``PartitionSpec(axis_name)`` for parts of one
    replica that don't mirror a sharded parameter, ``PartitionSpec()`` for parts
    that are equal everywhere.

  Raises:
    ValueError: if the state nests replicas deeper than there are axes; if
      ``params`` is required; for the sum of sparse gradients of a table whose
      rows are sharded; or if ``optax.MultiSteps`` or ``optax.apply_if_finite``
      around a transform has state of each replica that is not marked.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.adam(1e-3), "data", replicas_to_aggregate=3, total_num_replicas=4
    ... )
    >>> state = tx.init({"w": jnp.zeros((2, 6))})
    >>> P = jax.sharding.PartitionSpec
    >>> specs = optax_dist.states.state_specs(
    ...   state, "data", param_specs={"w": P(None, "model")}
    ... )
    >>> specs.inner_state[0].mu["w"], specs.inner_state[0].count
    (P(None, 'model'), P())
    >>> specs.replica.value.gradient_sum["w"]
    P('data', None, 'model')
    >>> specs.replica.value.local_step
    P('data',)
  """
  _check_wrappers(state)
  names = [axes.canonical_names(axis_name), *axes.levels_of(inner_axes)]
  levels = tuple(map(_joint, names))
  mirrors = None
  if param_specs is not None:
    mirrors = _Mirrors(param_specs, params)
  specs = _walk(state, levels, 0, mirrors)
  if mirrors is not None:
    mirrors.check_shapes()
  return specs


def state_axes(state: Any, *, depth: int = 0) -> Any:
  """Returns the batch axes of an optimizer state, for ``jax.vmap`` and ``pmap``.

  Args:
    state: an optax state, or its ``jax.eval_shape``, that contains states of
      this library.
    depth: 0 for the outermost map over replicas; 1 for one inside it, over the
      replicas that each of these consists of; and so on.

  Returns:
    A pytree like ``state``, for ``in_axes`` and ``out_axes``: 0 for parts of
    one replica, None for parts that are equal on all.

  Raises:
    ValueError: if ``optax.MultiSteps`` or ``optax.apply_if_finite`` around a
      transform has state of each replica that is not marked.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=4
    ... )
    >>> state_axes = optax_dist.states.state_axes(tx.init(jnp.zeros(2)))
    >>> state_axes.global_step, state_axes.replica.value.local_step
    (None, 0)
  """
  depth = checks.count("depth", depth, least=0)
  _check_wrappers(state)

  def mark(node: Any, level: Any) -> Any:
    if isinstance(node, PerReplica):
      return PerReplica(
        jax.tree.map(
          lambda part: mark(part, level + 1),
          node.value,
          is_leaf=is_per_replica,
        )
      )
    if level <= depth:
      return None
    _check_rows(node, 1)
    return 0

  return jax.tree.map(lambda x: mark(x, 0), state, is_leaf=is_per_replica)


def is_spec(x: Any) -> bool:
  """Whether ``x`` is a PartitionSpec; for ``is_leaf=``."""
  return isinstance(x, PartitionSpec)


def check_specs(name: str, specs: Any) -> None:
  """Checks an argument that is a pytree of specs.

  Raises:
    ValueError: if there is something else in it.
  """
  for x in jax.tree.leaves(specs, is_leaf=is_spec):
    if not is_spec(x):
      raise ValueError(
        f"`{name}` must be a pytree of PartitionSpec, got a {type(x).__name__} in"
        " it."
      )


def specs_of_updates(
  transform_name: str, param_specs: Any, updates: Any
) -> list[Any]:
  """Returns the spec of each update, of which a sparse one is one leaf.

  Args:
    transform_name: the transform, for the message.
    param_specs: a pytree of ``PartitionSpec`` like the updates, or a prefix of
      it; None is equivalent to ``PartitionSpec()``.
    updates: a pytree of gradients, dense or sparse.

  Raises:
    ValueError: if the specs do not match the updates.
  """
  try:
    treedef: Any = jax.tree.structure(updates, is_leaf=is_indexed_slices)
    tree = treedef.unflatten(range(treedef.num_leaves))
    is_leaf = lambda x: x is None or is_spec(x)
    specs = jax.tree.broadcast(param_specs, tree, is_leaf=is_leaf)
    specs = [spec or PartitionSpec() for spec in treedef.flatten_up_to(specs)]
    if not all(map(is_spec, specs)):
      raise TypeError(f"there is a {type(specs[0]).__name__} in it.")
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{transform_name}: `param_specs` must be a pytree of PartitionSpec like the"
      f" updates, or a prefix of it, but {error}"
    ) from error
  return specs


# Wrappers whose own state differs between replicas if they are around a transform
# of this library: the field of the inner state, one of their own, and the remedy.
_WRAPPERS: dict[type, tuple[str, str, str]] = {
  optax.MultiStepsState: (
    "inner_opt_state",
    "acc_grads",
    "MultiSteps adds up each replica's own gradients, but the field 'acc_grads' of"
    " its state does not say so. Wrap it: optax_dist.per_replica(optax.MultiSteps("
    "...), axis_name, 'acc_grads'). Or accumulate with sync_replicas(...,"
    " replicas_to_aggregate=steps * replicas). under_jit goes around all of it.",
  ),
  optax.ApplyIfFiniteState: (
    "inner_state",
    "notfinite_count",
    "apply_if_finite decides by each replica's own gradient whether to call the"
    " transform in it, and replicas that disagree on when to communicate hang. Put"
    " it inside, around the inner transformation; sync_replicas drops gradients"
    " that are not finite itself.",
  ),
}


def _check_wrappers(state: Any) -> None:
  """Raises an error for a wrapper that has its replicas' state, unmarked."""
  is_wrapper = lambda node: type(node) in _WRAPPERS
  for node in nodes(state, is_wrapper):
    inside, own, remedy = _WRAPPERS[type(node)]
    inner = getattr(node, inside)
    if has_replicas(inner) and not has_replicas(getattr(node, own)):
      raise ValueError(f"state_specs, state_axes: {remedy}")
    _check_wrappers(inner)


def _check_rows(leaf: Any, depth: int) -> None:
  """Raises an error for a number in the place of one for each replica."""
  if jnp.ndim(leaf) < depth:
    raise ValueError(
      f"state_specs, state_axes: a part of the state is {leaf}, but each replica has"
      " its own: give an array with a leading replica axis. To change a learning"
      " rate, that is optax.tree.set(state, learning_rate=jnp.full(num_replicas,"
      " 0.1))."
    )


def _joint(names: Sequence[axes.AxisName]) -> Any:
  return tuple(names) if len(names) > 1 else names[0]


def _walk(node: Any, levels: _Dims, depth: int, mirrors: Any) -> Any:
  """Returns the specs of a part of a state inside ``depth`` replicas."""
  replica = levels[:depth]
  if mirrors is not None:
    specs = mirrors.specs_of(node, levels, depth)
    if specs is not None:
      return specs
  if isinstance(node, PerReplica):
    if depth == len(levels):
      raise ValueError(
        "The state has a part of one replica inside a part of one replica, as"
        " with sync_replicas inside of diloco: give the axes of the inner"
        " replicas with `inner_axes`."
      )
    return PerReplica(_walk(node.value, levels, depth + 1, mirrors))
  if jax.tree_util.all_leaves([node]):
    _check_rows(node, depth)
    if mirrors is not None:
      mirrors.others.append(node)
    return PartitionSpec(*replica)
  parts, treedef = children(node)
  return treedef.unflatten(
    [_walk(part, levels, depth, mirrors) for part in parts]
  )


def children(node: Any) -> tuple[list[Any], Any]:
  """Returns the parts of a tree one level down, and the inverse."""
  return jax.tree.flatten(node, is_leaf=lambda x: x is not node)


class _Mirrors:
  """The parameters' specs, and the parts of a state that mirror them."""

  def __init__(self, param_specs: Any, params: Any):
    specs = jax.tree.map(_unboxed, param_specs, is_leaf=_is_spec_or_box)
    check_specs("param_specs", specs)
    self.shapes: dict[int, Any] | None = None
    if params is not None:
      unboxed = jax.tree.map(_unboxed, params, is_leaf=_is_box)
      with checks.structure("param_specs", "`params`, or of a prefix of it"):
        specs = jax.tree.broadcast(specs, unboxed, is_leaf=is_spec)
      self.shapes = dict(
        enumerate(tuple(x.shape) for x in jax.tree.leaves(unboxed))
      )
    # Each spec gets the number of its parameter, to compare shapes.
    numbers = iter(range(len(jax.tree.leaves(specs, is_leaf=is_spec))))
    self.tree = jax.tree.map(
      lambda spec: Numbered(next(numbers), spec), specs, is_leaf=is_spec
    )
    self.seen: dict[int, set[_Dims]] = {}
    self.is_sharded = any(map(axes.names_in, jax.tree.leaves(specs)))
    self.has_mirror = False
    self.others: list[Any] = []

  def specs_of(self, node: Any, levels: _Dims, depth: int) -> Any:
    """Returns the specs of a node that mirrors the parameters, or None."""
    assignments: list[Callable[[], None]] = []
    specs = match_params(node, self.tree, assignments)
    if specs is None or not assignments:
      return None
    self.has_mirror = True
    return jax.tree.map(
      lambda leaf: self._spec(leaf, levels, depth),
      specs,
      is_leaf=lambda x: isinstance(x, Found),
    )

  def _spec(self, match: "Found", levels: _Dims, depth: int) -> Any:
    spec, leaf = match.param.spec, match.leaf
    replica = levels[:depth]
    if isinstance(leaf, PerReplica):
      # A part of the parameter, as created by `sharded`: one slice of each shard.
      if depth == len(levels):
        raise ValueError(
          "The state has a part of one replica inside a part of one replica:"
          " give the axes of the inner replicas with `inner_axes`."
        )
      replica = levels[: depth + 1]
      return PerReplica(PartitionSpec(*replica, *spec))
    if isinstance(leaf, PerShard):
      return PerShard(PartitionSpec(*replica, *_over_all_axes(spec)))
    if isinstance(leaf, SparseSum):
      return _sparse_spec(leaf, spec, replica)
    shape = tuple(leaf.shape)[depth:]
    if self.shapes is not None:
      same = shape == self.shapes[match.param.number]
      return PartitionSpec(*replica, *(spec if same else ()))
    if not shape or not axes.names_in(spec):
      return PartitionSpec(*replica)
    self.seen.setdefault(match.param.number, set()).add(shape)
    return PartitionSpec(*replica, *spec)

  def check_shapes(self) -> None:
    """Raises an error if the state's shapes don't match those of the parameters."""
    arrays = [x for x in self.others if jnp.issubdtype(x.dtype, jnp.inexact)]
    if self.is_sharded and not self.has_mirror and any(x.ndim for x in arrays):
      raise ValueError(
        "`param_specs` must have the structure of the parameters: no part of the"
        " state has that of"
        f" {jax.tree.map(lambda each: each.spec, self.tree)!r:.200}."
      )
    for shapes in self.seen.values():
      if len(shapes) > 1:
        raise ValueError(
          "The state has arrays of different shapes for one parameter,"
          f" {sorted(shapes)}: give `params`, to tell which of them are sharded"
          " as it is."
        )


class Numbered:
  """The spec of a parameter (or another value), and its number."""

  def __init__(self, number: int, spec: Any):
    self.number = number
    self.spec = spec


class Found:
  """The part of a state in the place of a parameter."""

  def __init__(self, leaf: Any, param: Numbered):
    self.leaf = leaf
    self.param = param


def match_params(node: Any, specs: Any, leaves_found: list) -> Any:
  """Pairs the leaves of a part of a state with their parameters.

  Args:
    node: the part.
    specs: a tree like the parameters of :class:`Numbered`.
    found: the leaves found are appended to it.

  Returns:
    ``node`` with a :class:`Found` in the place of each leaf; None if ``node``
    does not have the structure of the parameters.
  """
  if isinstance(specs, Numbered):
    treedef: Any
    leaves, treedef = jax.tree.flatten(
      node, is_leaf=lambda x: isinstance(x, PerReplica | PerShard | SparseSum)
    )
    # A single leaf inside another node is in a Flax box.
    if len(leaves) > 1 or any(map(_is_whole_state, leaves)):
      return None
    leaves_found.extend(leaves)
    return treedef.unflatten([Found(leaf, specs) for leaf in leaves])
  if not jax.tree.leaves(node):
    return node  # A masked part.
  parts, treedef = children(node)
  of_specs, treedef_of_specs = children(specs)
  if jax.tree_util.all_leaves([node]) or treedef != treedef_of_specs:
    return None
  matched = []
  for part, of_part in zip(parts, of_specs, strict=True):
    match = match_params(part, of_part, leaves_found)
    if match is None and part is not None:
      return None
    matched.append(match)
  return treedef.unflatten(matched)


def _is_whole_state(x: Any) -> bool:
  """Whether ``x`` is a replica's state, rather than its part of one array."""
  return isinstance(x, PerReplica) and not jax.tree_util.all_leaves([x.value])


def _over_all_axes(spec: PartitionSpec) -> _Dims:
  """Returns the spec of what follows each other from shard to shard."""
  names = axes.names_in(spec)
  return (_joint(names),) if names else ()


def _sparse_spec(total: SparseSum, spec: PartitionSpec, replica: _Dims) -> Any:
  if len(spec) and spec[0] is not None:
    raise ValueError(
      "The sum of sparse gradients of a table can't be sharded by rows, as"
      f" `param_specs` has it with {spec}: each shard would hold other rows."
      " Shard the table by columns."
    )
  slots: Any = PartitionSpec(*replica)
  values: Any = PartitionSpec(*replica, None, *spec[1:]) if spec else slots
  return SparseSum(
    values=values,
    indices=slots,
    touches=slots,
  )


def _is_box(x: Any) -> bool:
  """Whether ``x`` is a Flax box of a parameter and its axes."""
  nnx = sys.modules.get("flax.nnx")
  if nnx is not None and isinstance(x, nnx.Variable):
    return True
  meta = sys.modules.get("flax.core.meta")
  return meta is not None and isinstance(x, meta.AxisMetadata)


def _is_spec_or_box(x: Any) -> bool:
  return is_spec(x) or _is_box(x)


def _unboxed(x: Any) -> Any:
  if not _is_box(x):
    return x
  (value,) = jax.tree.leaves(x, is_leaf=is_spec)
  return value
