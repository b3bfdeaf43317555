"""Sharded optimizer state: each replica updates its part of the parameters."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import (
  axes,
  checks,
  parts,
  replica_params,
  shard_scope,
)
from optax_dist._internal import extra_args as arguments
from optax_dist._internal import inner as inner_transformation
from optax_dist._internal.indexed_slices import is_indexed_slices
from optax_dist._internal.leaves import elementwise, precision, update_leaves
from optax_dist._internal.leaves.random_keys import is_key
from optax_dist._internal.placement.replica_blocks import (
  PASS_STATE,
  PerReplica,
  is_per_replica,
)
from optax_dist._internal.replicas import Replicas
from optax_dist._internal.shard_scope import Scope

_NAME = "sharded"
_REDUCTIONS = ("mean", "sum")
_SCATTERED = (
  "so nothing is left to scatter. Use cross_shard(..., param_specs=...) for it"
  " (optax.partition): its optimizer state is sharded like the parameter."
)


class ShardedState(NamedTuple):
  """State of :func:`sharded`.

  Attributes:
    inner_state: the inner state. An array that mirrors a parameter is a
      :class:`PerReplica` of one part per replica; others, such as a counter, are
      equal on all replicas.
  """

  inner_state: Any


def sharded(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  reduction: str = "mean",
  num_replicas: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Shards an optimizer's state over the replicas (ZeRO-1).

  The same result as ``optax.chain(optax_dist.cross_shard(axis_name), inner)``,
  with 1/N of the optimizer state on each device and the same amount of
  communication: each replica passes its own gradient and the whole parameters,
  and

  1. a reduce-scatter leaves each replica the mean of its part of the gradient;
  2. ``inner`` updates this part, with its part of the parameters and the state;
  3. an all-gather gives all replicas the whole updates.

  A leaf is cut into N slices along the dimension that needs the least padding with
  zeros, usually the first that N divides. So masks, labels and rates by leaf work
  in ``inner``, and no array is copied to be sent. There is a reduce-scatter and an
  all-gather of each leaf, which compilers for TPU and GPU combine.

  ``inner`` must be elementwise and must not use the shapes of leaves, like
  Adam, momentum, weight decay and schedules. This is checked before anything is
  computed, on its traces for whole leaves and for parts. Other transformations
  are rejected by name: global norms (use :func:`optax_dist.clip_by_global_norm`
  over ``axis_name`` inside), norms of a leaf (LAMB, LARS), matrices (Muon,
  Shampoo), factors (Adafactor), masks computed from shapes (specify them by
  name), noise.

  Take gradients with respect to :func:`optax_dist.local_params`, and pass the
  state in and out with :func:`optax_dist.states.state_specs` or
  :func:`optax_dist.states.state_axes`. If parameters are sharded over model axes too,
  call ``init`` inside the map: it shards the state of the shard that it sees.

  Args:
    inner: the transformation that gets the mean gradient, part by part.
    axis_name: the axis, or a sequence of axes, over the replicas.
    reduction: ``"mean"`` or ``"sum"`` of the gradients, or TensorFlow's names for
      these, as in :func:`optax_dist.cross_shard`.
    num_replicas: the number of replicas; None for the size of the axis. It is
      required if ``init`` is called outside of the map and of ``jax.set_mesh``.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`ShardedState`. Keyword arguments of ``update`` are passed to
    ``inner``. Numbers in its state are equal on all replicas, so ``value`` is
    averaged over them, and others must be equal, as in
    :func:`optax_dist.sync_replicas`. To change the number of replicas, see
    :func:`optax_dist.states.resize_sharded`.

  Raises:
    ValueError: at construction, if an argument is invalid; in ``init`` (or in
      ``update``, if it takes further arguments), if ``inner`` is not
      elementwise; in ``init``, if the number of replicas is unknown; in
      ``update``, if the axis has another size, a gradient arrives already
      summed, or the state was not passed as one replica's.
    TypeError: in ``update``, if a gradient is sparse, or not floating-point or
      complex.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sharded(
    ...   optax.sgd(1.0, momentum=0.5), "data", num_replicas=2
    ... )
    >>> params = jnp.zeros(3)
    >>> state = tx.init(params)
    >>> state.inner_state[0].trace.value.shape  # Two parts of two, one padded.
    (2, 2)
    >>> axes = optax_dist.states.state_axes(state)
    >>> update = jax.vmap(
    ...   lambda gradient, state: tx.update(gradient, state, params),
    ...   in_axes=(0, axes), out_axes=(0, axes), axis_name="data",
    ... )
    >>> gradients = jnp.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    >>> updates, state = update(gradients, state)
    >>> updates[0], state.inner_state[0].trace.value
    (Array([-2., -2., -2.], dtype=float32), Array([[2., 2.],
           [2., 0.]], dtype=float32))

  References:
    Rajbhandari et al. 2020, `ZeRO <https://arxiv.org/abs/1910.02054>`_; Xu et al.
    2020, `Automatic Cross-Replica Sharding of Weight Update
    <https://arxiv.org/abs/2004.13336>`_.
  """
  replicas = Replicas.of(_NAME, axis_name, num_replicas, ())
  reduction = checks.reduction(reduction, _REDUCTIONS)
  inner = inner_transformation.checked(
    _NAME, inner, replicas.names, counts_steps=False
  )
  zero = _Sharded(replicas, inner, reduction == "mean", set())
  return optax.GradientTransformationExtraArgs(zero.init, zero.update)


@dataclasses.dataclass(frozen=True)
class _Sharded:
  """The rule of :func:`sharded`.

  Attributes:
    replicas: the replicas.
    inner: the transformation that gets parts.
    is_mean: whether it gets the mean of the gradients, and not the sum.
    known: the types for which ``inner`` was checked.
  """

  replicas: Replicas
  inner: optax.GradientTransformationExtraArgs
  is_mean: bool
  known: set[Any]

  def init(self, params: optax.Params) -> ShardedState:
    names, count = self.replicas.names, self.replicas.at_init()
    params = replica_params.strong(params)
    try:
      self._check(params, params, count, {})
    except Exception as error:
      # The check may fail for lack of arguments or axes; then the update checks again.
      if isinstance(error.__cause__, elementwise.NotElementwise):
        raise
    is_part = _is_part(self.inner, params, count)
    if axes.bound_axes().keys() >= set(names):
      own = jax.tree.map(lambda x: parts.own(x, names, count), params)
      state = self.inner.init(own)
      mark = lambda x: PerReplica(axes.cast_to_varying(x[None], names))
    else:
      # Replica parts; state that does not mirror a part is equal on all
      # replicas.
      cut = jax.tree.map(lambda x: parts.rows(x, count), params)
      state = jax.vmap(self.inner.init, out_axes=0, axis_size=count)(cut)
      state = jax.tree.map(lambda x, p: x if p else x[0], state, is_part)
      mark = PerReplica
    return ShardedState(
      jax.tree.map(lambda x, p: mark(x) if p else x, state, is_part)
    )

  def update(
    self,
    updates: optax.Updates,
    state: ShardedState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ShardedState]:
    names, count = self.replicas.names, self.replicas.in_update()
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates, is_leaf=is_indexed_slices)
    _check_updates(updates, params, names)
    arguments.check_equal(_NAME, names, extra_args)
    extra_args = arguments.of_all(names, extra_args)
    self._check(params, updates, count, extra_args)

    # 1. Each replica's part of the mean gradient.
    wide = [precision.for_sums(x) for x in leaves]
    own = parts.reduce_scatter(wide, names, count, self.is_mean)
    own = [precision.cast_like(x, y) for x, y in zip(own, leaves, strict=True)]
    own = treedef.unflatten(own)

    # 2. Its update.
    if params is not None:
      params = jax.tree.map(
        lambda x: parts.own(x, names, count), replica_params.strong(params)
      )
    types = jax.eval_shape(self.inner.init, own if params is None else params)
    inner_state = jax.tree.map(
      _own_part, state.inner_state, types, is_leaf=is_per_replica
    )
    with shard_scope.inside(Scope(names)):
      own, inner_state = self.inner.update(
        own, inner_state, params, **extra_args
      )
    inner_state = jax.tree.map(
      lambda node, x: _put_back(node, x, names),
      state.inner_state,
      inner_state,
      is_leaf=is_per_replica,
    )
    arguments.check_state(
      _NAME, names, _equal(state.inner_state), _equal(inner_state)
    )

    # 3. The whole update.
    new = parts.all_gather(treedef.flatten_up_to(own), leaves, names, count)
    return treedef.unflatten(new), ShardedState(inner_state)

  def _check(
    self, params: Any, updates: Any, count: int, extra_args: dict[str, Any]
  ) -> None:
    key = (_shapes_key(params), _shapes_key(updates), count)
    if key not in self.known:
      names = self.replicas.names
      _check_inner(self.inner, params, updates, count, extra_args, names)
      self.known.add(key)


def _own_part(node: Any, like: Any) -> Any:
  """Returns this replica's part of an array, without the replica axis."""
  if not is_per_replica(node):
    return node
  x = node.value
  if jnp.shape(x) == like.shape:
    return x
  if jnp.shape(x) == (1, *like.shape):
    return x[0]
  raise ValueError(
    f"{_NAME}: a part of an array of the state has shape {like.shape}, but this"
    f" replica sees {jnp.shape(x)}: the state of several replicas, or of another"
    f" number of them. {PASS_STATE}"
  )


def _put_back(node: Any, x: Any, names: tuple[axes.AxisName, ...]) -> Any:
  if not is_per_replica(node):
    return x
  x = axes.cast_to_varying(x, names)
  return PerReplica(x.reshape(jnp.shape(node.value)))


def _equal(state: Any) -> Any:
  """Returns a state without the replicas' parts."""
  return jax.tree.map(
    lambda x: None if is_per_replica(x) else x, state, is_leaf=is_per_replica
  )


def _check_updates(
  updates: optax.Updates,
  params: optax.Params | None,
  names: tuple[axes.AxisName, ...],
) -> None:
  """Checks that updates are dense, and each replica's own."""
  paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=is_indexed_slices
  )
  for path, leaf in paths_and_leaves:
    if is_indexed_slices(leaf):
      raise TypeError(
        f"{_NAME}: {update_leaves.name_of(path)} is sparse, which has no parts."
        " Make it dense with its to_dense(), or use cross_shard or sync_replicas"
        " for tables."
      )
  update_leaves.check_gradients(_NAME, updates, names, _SCATTERED)
  if params is not None:
    update_leaves.check_like(_NAME, updates, params)


def _shapes_key(tree: Any) -> Any:
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
  # An empty leaf counts as having one element, like its parts.
  shape = tuple(max(1, dim) for dim in jnp.shape(x))
  return jax.ShapeDtypeStruct(shape, jnp.result_type(x))


def _of_part(x: Any, count: int) -> jax.ShapeDtypeStruct:
  """The type of a part, flat: ``inner`` must not use its shape.

  Of a leaf with several elements it has several too: with one, a number in an array
  need not be broadcast to it, and its program would differ from that of the leaf.
  """
  shape = jnp.shape(x)
  each = math.prod(parts.shape_of(shape, count))
  each = max(each, min(2, math.prod(shape)))
  return jax.ShapeDtypeStruct((each,), jnp.result_type(x))


def _is_part(inner: Any, params: Any, count: int) -> Any:
  """Returns, for each leaf of the inner state, whether it mirrors a part.

  It does if its length changes with the parts' length.
  """
  lengths = [
    jax.tree.map(
      lambda x, more=more: jax.ShapeDtypeStruct(
        (_of_part(x, count).size + more,), jnp.result_type(x)
      ),
      params,
    )
    for more in (0, 1)
  ]
  first, second = (jax.eval_shape(inner.init, tree) for tree in lengths)
  return jax.tree.map(lambda a, b: a.shape != b.shape, first, second)


def _check_inner(
  inner: optax.GradientTransformationExtraArgs,
  params: Any,
  updates: optax.Updates,
  count: int,
  extra_args: dict[str, Any],
  names: tuple[axes.AxisName, ...],
) -> None:
  """Checks that ``inner`` can be applied to parts.

  Raises:
    ValueError: if not; names the reason, and the remedy.
  """
  params, updates = jax.tree.map(_struct, (params, updates))
  of_part = lambda tree: jax.tree.map(lambda x: _of_part(x, count), tree)
  like = updates if params is None else params
  try:
    with shard_scope.inside(Scope(is_inspection=True)):
      whole, part = (
        jax.eval_shape(inner.init, x) for x in (like, of_part(like))
      )
      _check_structure(whole, part)
      is_part = jax.tree.leaves(_is_part(inner, like, count))
      _check_state(whole, part, is_part, like)
      _check_init(inner, like, of_part(like), is_part)
      elementwise.check(
        lambda *args: inner.update(*args, **extra_args),
        (updates, whole, params),
        (of_part(updates), part, of_part(params)),
        [*_all(updates), *is_part, *_all(params)],
        [*_all(updates), *is_part],
      )
  except elementwise.NotElementwise as error:
    raise ValueError(
      f"{_NAME}: `inner` can't be sharded: {error}. Each replica has a part"
      " of each leaf, so it must work element by element. To clip by the global"
      f" norm, use optax_dist.clip_by_global_norm(max_norm, {names!r}) inside; give"
      " masks and labels by name instead of by shape; use all else unsharded, in"
      " optax.chain(optax_dist.cross_shard(axis_name), ...)."
    ) from error


def _all(tree: Any) -> list[bool]:
  return [True] * len(jax.tree.leaves(tree))


def _check_init(inner: Any, like: Any, part: Any, is_part: list[bool]) -> None:
  """Checks that each element of the state starts from its own of a leaf."""
  # Zeros like a random key are made of several numbers for each.
  state = jax.tree.leaves(jax.eval_shape(inner.init, like))
  at = [i for i, x in enumerate(state) if not is_key(x)]

  def init(params: Any) -> list[Any]:
    state = jax.tree.leaves(inner.init(params))
    return [state[i] for i in at]

  starts = [is_part[i] for i in at]
  elementwise.check(init, (like,), (part,), _all(like), starts)


def _check_structure(whole: Any, of_part: Any) -> None:
  """Raises an error if two states differ in structure; names the difference."""
  treedefs: list[Any] = [jax.tree.structure(x) for x in (whole, of_part)]
  if treedefs[0] == treedefs[1]:
    return
  names = set()
  for state, other in ((whole, of_part), (of_part, whole)):
    known = {path for path, _ in jax.tree_util.tree_leaves_with_path(other)}
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
      if path not in known:
        names.add(_owner(state, path))
  raise elementwise.NotElementwise(
    f"{' and '.join(sorted(names)) or 'a part'} in its state differs in structure"
    " for whole leaves and for parts"
  )


def _check_state(
  whole: Any, of_part: Any, is_part: list[bool], params: Any
) -> None:
  shapes = {x.shape for x in jax.tree.leaves(params)}
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(whole)
  for (path, x), y, part in zip(
    paths_and_leaves, jax.tree.leaves(of_part), is_part, strict=True
  ):
    like = part and x.shape in shapes and len(y.shape) == 1
    if not (like or (not part and x.shape == y.shape)):
      raise elementwise.NotElementwise(
        f"{_owner(whole, path)}{jax.tree_util.keystr(path)} has shape {x.shape}"
        f" for whole leaves and {y.shape} for parts"
      )


def _owner(state: Any, path: jax.tree_util.KeyPath) -> str:
  """Returns the name of the innermost state that a leaf is in."""
  name = type(state).__name__
  for key in path:
    if hasattr(key, "name"):
      state = getattr(state, key.name)
    else:
      state = state[getattr(key, "idx", getattr(key, "key", None))]
    if hasattr(state, "_fields"):
      name = type(state).__name__
  return name
