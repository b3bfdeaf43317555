"""Mean or sum of the updates over mesh axes."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, checks, collectives, provenance
from optax_dist._internal.indexed_slices import (
  IndexedSlices,
  is_indexed_slices,
  map_values,
  sum_duplicates,
  values_of,
)
from optax_dist._internal.leaves import precision, update_leaves
from optax_dist._internal.placement.specs import specs_of_updates
from optax_dist.compression.interface import Compression
from optax_dist.compression.transform import compressed
from optax_dist.transforms._adasum import by_adasum

_NAME = "cross_shard"
_REDUCTIONS = ("mean", "sum", "adasum")
_INVARIANT_UPDATES = ("summed", "reduced", "error")
_SCATTERED = (
  "so it must not be summed again. Say which parameters are sharded:"
  f" {_NAME}(..., param_specs=...), with the PartitionSpecs that they are passed"
  " into the map with."
)


def cross_shard(
  axis_name: axes.AxisNames,
  *,
  reduction: str = "mean",
  axis_index_groups: collectives.Groups | None = None,
  invariant_updates: Literal["summed", "reduced", "error"] = "summed",
  param_specs: Any = None,
  compression: Compression | None = None,
  num_replicas: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Replaces each replica's updates with their mean or sum over all replicas.

  Use it inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap(axis_name=)``, in
  a chain: transforms before it see one replica's gradient, transforms after it
  the aggregated one, which is equal on all replicas::

    optax.chain(
        optax_dist.cross_shard("data"),
        optax.clip_by_global_norm(1.0),
        optax.adam(1e-3),
    )

  The result is the same in each of these maps. In particular, under
  ``shard_map(check_vma=True)`` the gradient from ``jax.grad`` with respect to
  replicated parameters is *already summed* over the replicas, so that
  ``jax.lax.pmean`` would return a gradient that is too large by the number of
  replicas. The type shows this (the update does not vary over the axis), and
  ``cross_shard`` then divides without communicating. An update that was already
  reduced by ``jax.lax.pmean``, ``cross_shard`` or
  :func:`optax_dist.sync_replicas` has the same type, and is distinguished by
  how it was computed: it counts as equal on all replicas, as in the other maps,
  so a mean leaves it unchanged.

  Updates may be any pytree of floating-point or complex arrays: dtypes are
  kept, also by the sum, which overflows where that of ``jax.lax.pmean`` does. None
  and other empty nodes pass through. The rows of sparse updates
  (:class:`optax_dist.IndexedSlices`) are gathered, never made dense. Small leaves
  share a message.

  Keyword arguments of ``update`` reach the other transformations of a chain as they
  are. These share their state, so pass ``value=jax.lax.pmean(loss, axis_name)``, not
  each replica's own, to ``optax.contrib.reduce_on_plateau`` and line searches.

  Args:
    axis_name: the axis, or a sequence of axes to reduce together, over the
      replicas.
    reduction: ``"mean"``, ``"sum"``, or ``"adasum"``, which adds orthogonal and
      averages parallel components, leaf by leaf. The last one gathers all
      replicas' updates, and requires each replica's own. TensorFlow's constants
      ``losses.Reduction.MEAN`` and ``SUM``, ``"weighted_mean"`` and
      ``"weighted_sum"``, are the first two.
    axis_index_groups: a list of lists of indices along the (single) axis, equal
      in size, which partition it: each group aggregates separately, and the
      mean is over the group. This is TensorFlow's ``group_assignment``. None,
      or ``[]`` as in TensorFlow, for one group of all.
    invariant_updates: how to treat an update that, by its type, does not vary
      over a tracked axis and was not reduced by a collective as above.
      ``"summed"``: as the gradient of each replica's loss, summed by
      ``jax.grad``. ``"reduced"``: as final, to be left unchanged, for example
      if the differentiated loss is itself a ``jax.lax.pmean``, or if the
      gradient is an argument of the mapped function. These have the same type,
      without a visible collective. ``"error"``: raise an error.
    param_specs: for parameters that are sharded over an axis of ``axis_name``,
      and gathered where they are used (FSDP): the ``PartitionSpec`` of each, in
      a pytree like the updates (or a prefix of it), or a function of the
      updates that returns one. Such a gradient arrives summed, with one shard
      of it on each replica, and is only divided for the mean, by the first
      ``cross_shard`` in a chain, if there are several. Other axes may be
      included; None is equivalent to ``PartitionSpec()``.
    compression: a method of :mod:`optax_dist.compression`, to aggregate each
      replica's own updates in fewer bytes; None for no compression.
    num_replicas: with ``compression``, the number of replicas; None for the
      size of the axis. It is required if ``init`` is called outside of the map
      and of ``jax.set_mesh``. Without ``compression`` it is not used.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs`; it is stateless except
    with ``compression``, whose state is passed in and out of the map by
    :func:`optax_dist.states.state_specs` (or :func:`optax_dist.states.state_axes`).

  Raises:
    ValueError: at construction, if an argument is invalid; in ``update``, if
      the groups do not match the axis, or if an update arrives already summed
      and can't be split again: with groups, or if the given ``params`` vary
      over the axis, so that it can't be their summed gradient; or if it is the
      shard of a sum, as the program shows, without a matching ``param_specs``.
    TypeError: in ``update``, if an update is not floating-point or complex.
    UnboundAxisError: in ``update``, if an axis is not bound; lists those that
      are.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax.chain(optax_dist.cross_shard("data"), optax.sgd(1.0))
    >>> def update(gradient):
    ...   return tx.update(gradient, tx.init(gradient))[0]
    >>> jax.vmap(update, axis_name="data")(jnp.array([1.0, 2.0, 6.0]))
    Array([-3., -3., -3.], dtype=float32)

  References:
    TensorFlow 1, `tf.compat.v1.tpu.CrossShardOptimizer
    <https://www.tensorflow.org/api_docs/python/tf/compat/v1/tpu/CrossShardOptimizer>`_.
  """
  names = axes.canonical_names(axis_name)
  reduction = checks.reduction(reduction, _REDUCTIONS)
  checks.one_of("invariant_updates", invariant_updates, _INVARIANT_UPDATES)
  checks.count_or_none("num_replicas", num_replicas)
  special = param_specs is not None or invariant_updates == "reduced"
  _check_groups(axis_index_groups, names, param_specs)
  groups = axis_index_groups or None
  if (special or groups) and (compression is not None or reduction == "adasum"):
    what = "compression" if compression is not None else "reduction='adasum'"
    raise ValueError(
      f"`{what}` can't be combined with `axis_index_groups`, `param_specs` or"
      " `invariant_updates='reduced'`."
    )
  if compression is not None:
    if reduction == "adasum":
      raise ValueError("`compression` has no `reduction` 'adasum'.")
    return compressed(_NAME, compression, names, num_replicas, reduction)
  if reduction == "adasum":
    return by_adasum(_NAME, names)
  mean = _Reduction(
    names, reduction == "mean", groups, invariant_updates, param_specs
  )
  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, mean.update
  )


def _check_groups(
  groups: Any, names: tuple[axes.AxisName, ...], param_specs: Any
) -> None:
  """Checks the argument ``axis_index_groups``, and what it excludes."""
  collectives.check_groups(groups)
  if groups and len(names) > 1:
    raise ValueError(
      f"`axis_index_groups` needs a single axis, got `axis_name`={names!r}."
    )
  if groups and param_specs is not None:
    raise ValueError(
      "`param_specs` can't be combined with `axis_index_groups`: a sum over the"
      " whole axis can't be split into groups again."
    )


@dataclasses.dataclass(frozen=True)
class _Reduction:
  """The rule of :func:`cross_shard`, whose arguments are its attributes."""

  names: tuple[axes.AxisName, ...]
  is_mean: bool
  groups: collectives.Groups | None
  invariant_updates: str
  param_specs: Any

  def update(
    self,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    del extra_args
    sizes = axes.check_bound(self.names, _NAME)
    if self.groups:
      collectives.check_partition(self.groups, sizes[self.names[0]])
      sizes = {self.names[0]: len(self.groups[0])}
    treedef: Any
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(
      updates, is_leaf=is_indexed_slices
    )
    param_of = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    sharded_over = self._sharded_over(updates)
    known = provenance.Known(is_specified=self.param_specs is not None)
    leaves, kinds = [], []
    for (path, x), shards in zip(paths_and_leaves, sharded_over, strict=True):
      update_leaves.check_dtype(_NAME, path, x)
      x = x if is_indexed_slices(x) else jnp.asarray(x)
      leaves.append(x)
      kinds.append(self._kind(path, x, shards, param_of.get(path), known))

    # The sum over the axes along which replicas have updates of their own.
    over = [tuple(a for a in self.names if kind[a] == "own") for kind in kinds]
    wide = [map_values(precision.for_sums, x) for x in leaves]
    sums = _sum(wide, over, self.groups)

    # Marks the results for later cross_shards, even if nothing is left to do.
    with provenance.reduced_over(self.names):
      results = [
        _like(self._of_all(total, kind, sizes, shards), x)
        for total, kind, shards, x in zip(
          sums, kinds, sharded_over, leaves, strict=True
        )
      ]
    return treedef.unflatten(results), state

  def _sharded_over(self, updates: Any) -> list[frozenset[axes.AxisName]]:
    """Returns, by leaf, the axes that its parameter is sharded over."""
    specs = self.param_specs
    if callable(specs):
      specs = specs(updates)
    return [
      frozenset(axes.names_in(spec)) & frozenset(self.names)
      for spec in specs_of_updates(_NAME, specs, updates)
    ]

  def _of_all(
    self,
    total: Any,
    kind: dict[axes.AxisName, str],
    sizes: dict[axes.AxisName, int],
    shards: frozenset[axes.AxisName],
  ) -> Any:
    """The mean or the sum over all axes."""
    size = lambda *which: math.prod(sizes[a] for a in kind if kind[a] in which)
    if self.is_mean:
      return _divide(total, size("own", "summed"))
    marks = bool(axes.tracked_axes(self.names) or shards)
    return _multiply(total, size("equal"), marks)

  def _kind(
    self,
    path: jax.tree_util.KeyPath,
    leaf: Any,
    shards: frozenset[axes.AxisName],
    param: Any,
    known: provenance.Known,
  ) -> dict[axes.AxisName, str]:
    """What an update is along each axis.

    Each replica's "own"; "summed" already; "equal" on all replicas, such as a mean;
    or "final", as the caller says.
    """
    what = f"{_NAME}: {update_leaves.name_of(path)}"
    tracked = axes.tracked_axes(self.names)
    invariant = tracked - axes.all_varying_axes(leaf)
    self._check_shards(what, leaf, shards, invariant, known)
    equal = frozenset(a for a in invariant if _is_reduced(leaf, a, known))
    again = frozenset(
      a for a in shards if provenance.was_reduced(leaf, a, known)
    )
    is_error = self.invariant_updates == "error"
    unknown = invariant if is_error else invariant - equal
    if unknown and self.invariant_updates != "reduced":
      self._check_invariant(what, leaf, unknown, param)
    _check_compiles(what, leaf, invariant, known)
    kind = dict.fromkeys(self.names, "own")
    kind |= dict.fromkeys(shards | invariant, "summed")
    kind |= dict.fromkeys(equal | again, "equal")
    if self.invariant_updates == "reduced":
      kind |= dict.fromkeys(invariant, "final")
    return kind

  def _check_shards(
    self,
    what: str,
    leaf: Any,
    shards: frozenset[axes.AxisName],
    invariant: frozenset[axes.AxisName],
    known: provenance.Known,
  ) -> None:
    """Raises an error if an update is a shard of a sum without a spec for it."""
    if shards and is_indexed_slices(leaf):
      raise ValueError(
        f"{what} is sparse, but `param_specs` has its parameter sharded over axis"
        f" {axes.listed(shards)}."
      )
    equal = shards & invariant
    if equal:
      raise ValueError(
        f"{what} does not vary over axis {axes.listed(equal)}, but `param_specs` has"
        " its parameter sharded over it."
      )
    if not is_indexed_slices(leaf):
      others = [a for a in self.names if a not in shards]
      provenance.check_whole(what, leaf, others, _SCATTERED, known)

  def _check_invariant(
    self, what: str, leaf: Any, unknown: frozenset[axes.AxisName], param: Any
  ) -> None:
    """Raises an error if the meaning of an invariant update is unknown."""
    axis = axes.listed(unknown)
    if unknown & axes.unreduced_axes(leaf):
      reason = f"is typed as not yet reduced over {axis}."
    elif self.invariant_updates == "error":
      reason = f"does not vary over axis {axis}: it arrived already reduced."
    elif self.groups and len(self.groups) > 1:
      reason = (
        f"arrived already summed over the whole axis {axis}, which can't be split"
        " into `axis_index_groups` again."
      )
    elif param is not None and unknown & axes.varying_axes(param):
      reason = (
        f"does not vary over axis {axis}, but its parameter does, so it is not that"
        " parameter's summed gradient and may have been reduced before."
      )
    else:
      return
    raise ValueError(
      f"{what} {reason} Differentiate with respect to"
      " optax_dist.local_params(params, axis_name) to get each replica's own"
      " gradient, or say what the update is with cross_shard(...,"
      " invariant_updates=...)."
    )


def _sum(
  leaves: list[Any],
  over: list[tuple[axes.AxisName, ...]],
  groups: collectives.Groups | None,
) -> list[Any]:
  """Sums dense leaves, and gathers the rows of sparse ones."""
  dense = [i for i, leaf in enumerate(leaves) if not is_indexed_slices(leaf)]
  results = list(leaves)
  sums = collectives.sum_leaves(
    [leaves[i] for i in dense], [over[i] for i in dense], groups
  )
  for i, total in zip(dense, sums, strict=True):
    results[i] = total
  for i, leaf in enumerate(leaves):
    if is_indexed_slices(leaf) and over[i]:
      values, indices = (
        collectives.gather_rows(
          axes.cast_to_varying(x, over[i]), over[i], groups
        )
        for x in (leaf.values, leaf.indices)
      )
      results[i] = sum_duplicates(
        IndexedSlices.unchecked(values, indices, leaf.shape)
      )
  return results


def _divide(x: Any, divisor: int) -> Any:
  if divisor == 1:
    return x
  return map_values(lambda x: x / jnp.asarray(divisor, x.dtype), x)


def _multiply(x: Any, factor: int, always: bool) -> Any:
  if factor == 1 and not always:
    return x
  return map_values(lambda x: x * jnp.asarray(factor, x.dtype), x)


def _like(x: Any, leaf: Any) -> Any:
  """Casts the result for a leaf of few bits to its dtype."""
  return map_values(lambda x: precision.cast_like(x, leaf), x)


def _is_reduced(
  leaf: Any, name: axes.AxisName, known: provenance.Known
) -> bool:
  """Whether a value is equal along an axis because it was reduced before."""
  arrays = jax.tree.leaves(leaf)
  return any(provenance.origin_of(x, name, known) == "caller" for x in arrays)


def _check_compiles(
  what: str,
  leaf: Any,
  invariant: frozenset[axes.AxisName],
  known: provenance.Known,
) -> None:
  """Raises an error for a gradient whose sum in ``jax.grad`` XLA can't compile."""
  if collectives.can_sum(values_of(leaf).dtype):
    return
  summed = [
    name
    for name in invariant
    if provenance.origin_of(values_of(leaf), name, known) == "gradient"
  ]
  if summed:
    raise NotImplementedError(
      f"{what} is bfloat16, and jax.grad summed it"
      f" over axis {axes.listed(summed)} of a mesh with further axes that are not"
      " mapped: XLA for CPUs aborts when it compiles such a sum. Differentiate with"
      " respect to optax_dist.local_params(params, axis_name): cross_shard then"
      " adds up in float32. Or map all axes of the mesh."
    )
