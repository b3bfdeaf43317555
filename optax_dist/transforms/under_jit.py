"""Transforms under plain ``jax.jit``, on global arrays, without a map."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_dist._internal import axes, checks, replication
from optax_dist._internal.placement.replica_blocks import is_per_replica
from optax_dist._internal.placement.specs import (
  check_specs,
  is_spec,
  state_specs,
)
from optax_dist.transforms._agreement import (
  PARAMS,
  STATE,
  Refusal,
  argument,
)

_NAME = "under_jit"


def under_jit(
  tx: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  mesh: jax.sharding.Mesh | None = None,
  own_params: bool = False,
  param_specs: Any = None,
  inner_axes: tuple[axes.AxisNames, ...] = (),
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation callable under plain ``jax.jit``.

  The transformations of this library communicate over a named axis, which
  ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` binds. Here ``init`` and
  ``update`` take global arrays, without a map around them: each is one
  ``jax.shard_map`` over the replicas. So the results and the collectives are
  those of a training step written with ``shard_map``, while the rest of the
  step is left to the compiler::

    tx = optax_dist.under_jit(
        optax_dist.sync_replicas(
            optax.adam(1e-3), "data", replicas_to_aggregate=6
        ),
        "data",
        mesh=mesh,
    )

    @jax.jit
    def step(params, state, batches, arrived):  # Batches of [replicas, ...].
      grads = jax.vmap(jax.grad(loss), (None, 0), spmd_axis_name="data")(
          params, batches
      )
      updates, state = tx.update(
          grads, state, params, arrived=optax_dist.PerReplica(arrived)
      )
      return optax.apply_updates(params, updates), state

  The gradients are per replica and have a leading replica axis. (A gradient of
  a loss over the global batch is already global, and does not need this library
  to average it.)

  Args:
    tx: a transformation that communicates over ``axis_name``, alone or in a chain.
    axis_name: the mesh axis, or a sequence of axes, over the replicas.
    mesh: the mesh; None for that of ``jax.set_mesh``.
    own_params: whether each replica has its own parameters, as with
      ``elastic_average``, ``local_updates`` and ``streaming_updates``: then the
      parameters and the returned updates have a leading replica axis too.
      Otherwise all replicas share them.
    param_specs: a pytree of ``PartitionSpec`` like the parameters of one
      replica (or a prefix of it), if these are sharded over further axes of the
      mesh and ``tx`` should see one shard of them. None leaves further axes to
      the compiler.
    inner_axes: axes of replicas within replicas, see :func:`state_specs`;
      gradients then have the further replica axes after the first.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with the complete state of
    ``tx``, sharded according to :func:`state_specs`. Keyword arguments of
    ``update`` that are per replica must be marked as a :class:`PerReplica` with
    a leading replica axis; all others are passed to every replica whole.

  Raises:
    ValueError: if there is no mesh, it lacks an axis, or jax.set_mesh has another
      one; in ``update``, if a per-replica array has another leading axis, if an
      array is not placed on a mesh with Explicit axes, or if what all replicas share
      would differ between them, see :func:`train_step`.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> tx = optax_dist.under_jit(
    ...   optax.chain(optax_dist.cross_shard("data"), optax.sgd(1.0)),
    ...   "data", mesh=mesh,
    ... )
    >>> params = optax_dist.states.place(jnp.zeros(2), mesh, jax.P())
    >>> state = tx.init(params)
    >>> gradients = optax_dist.states.place(jnp.ones((1, 2)), mesh, jax.P("data"))
    >>> jax.jit(tx.update)(gradients, state, params)[0]
    Array([-1., -1.], dtype=float32)
  """
  checks.flag("own_params", own_params)
  checks.transformation("tx", tx)
  check_specs("param_specs", param_specs)
  levels = [axes.canonical_names(axis_name), *axes.levels_of(inner_axes)]
  if mesh is not None:
    check_mesh(_NAME, mesh, sum(levels, ()))
  tx = optax.with_extra_args_support(tx)
  mapped = _Mapped(tx, levels, mesh, own_params, param_specs)
  return optax.GradientTransformationExtraArgs(mapped.init, mapped.update)


@dataclasses.dataclass(frozen=True)
class _Mapped:
  """A transformation in maps of its own: of :func:`under_jit`, with its arguments.

  Attributes:
    tx: the transformation.
    levels: names of the axes over the replicas, over those that they consist of, ...
    mesh, own_params, param_specs: see :func:`under_jit`.
  """

  tx: optax.GradientTransformationExtraArgs
  levels: list[tuple[axes.AxisName, ...]]
  mesh: Any
  own_params: bool
  param_specs: Any

  def init(self, params: optax.Params) -> optax.OptState:
    mesh = self._checked_mesh()
    own = int(self.own_params)
    if own:
      check_rows(_NAME, "params", params, mesh, self.levels[:1])
    own_params = self._of_one(params)
    abstract: Any = getattr(mesh, "abstract_mesh", mesh)
    with jax.sharding.use_abstract_mesh(abstract):
      shapes = jax.eval_shape(self.tx.init, own_params)
    (state,) = self._over_replicas(
      lambda params: (self.tx.init(_rows(own, params)),),
      (self._specs(own),),
      (self._specs_of_state(shapes, own_params),),
      ("parameters",),
    )(params)
    return state

  def update(
    self,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    mesh = self._checked_mesh()
    depth, own = len(self.levels), int(self.own_params)
    check_rows(_NAME, "updates", updates, mesh, self.levels)
    if own:
      check_rows(_NAME, "params", params, mesh, self.levels[:1])
    arrays, of_arrays, labels, rebuild = split_arguments(
      extra_args, self._by_replica(depth), functools.partial(_rows, depth)
    )
    specs = (
      self._specs(depth),
      self._specs_of_state(state, self._of_one(params)),
      self._specs(own),
    )
    explicit = set(getattr(mesh, "explicit_axes", ())) & self._manual(mesh)
    for what, tree, of_tree in zip(
      ("updates", "state", "params"),
      (updates, state, params),
      specs,
      strict=True,
    ):
      _check_placed(what, tree, of_tree, explicit)

    def one_replica(
      updates: optax.Updates, state: Any, params: Any, arrays: list[Any]
    ) -> tuple[Any, Any]:
      updates, state = self.tx.update(
        _rows(depth, updates), state, _rows(own, params), **rebuild(arrays)
      )
      return _blocks(own, updates), state

    return self._over_replicas(
      one_replica,
      (*specs, of_arrays),
      (specs[2], specs[1]),
      ("gradients", "state", "parameters", labels),
    )(updates, state, params, arrays)

  def _of_one(self, params: Any) -> Any:
    """The shapes of one replica's parameters."""
    own = int(self.own_params)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[own:], jnp.result_type(x)),
      params,
    )

  def _over_replicas(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, labels: Any
  ) -> Callable[..., Any]:
    names = sum(self.levels, ())
    return replication.shard_map(
      fun,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=self._manual(self._checked_mesh()),
      labels=labels,
      refuse=Refusal(_NAME, names, (PARAMS, STATE)[-len(out_specs) :]),
      # With more axes than the replicas', transforms need the types over them.
      check_vma=self.param_specs is not None or len(self.levels) > 1,
    )

  def _checked_mesh(self) -> Any:
    names = sum(self.levels, ())
    mesh = self.mesh
    if mesh is None:
      mesh = jax.sharding.get_abstract_mesh()
    check_mesh(_NAME, mesh, names)
    check_context(_NAME, self.mesh, names)
    return mesh

  def _manual(self, mesh: Any) -> set[axes.AxisName]:
    # With sharded parameters every axis is manual, so each shard is seen alone.
    whole = self.param_specs is None
    return set(sum(self.levels, ())) if whole else set(mesh.axis_names)

  def _by_replica(self, depth: int) -> PartitionSpec:
    """The spec of arrays with the leading axes of the first levels of replicas."""
    return PartitionSpec(
      *(n if len(n) > 1 else n[0] for n in self.levels[:depth])
    )

  def _specs(self, depth: int) -> Any:
    """The specs of arrays like the parameters, after the replicas' axes."""
    replica = self._by_replica(depth)
    if self.param_specs is None:
      return replica
    return jax.tree.map(
      lambda spec: PartitionSpec(*replica, *spec),
      self.param_specs,
      is_leaf=is_spec,
    )

  def _specs_of_state(self, state: Any, params: Any) -> Any:
    return state_specs(
      state,
      self.levels[0],
      inner_axes=self.levels[1:],
      param_specs=self.param_specs,
      params=params if self.param_specs is not None else None,
    )


def check_mesh(
  transform_name: str, mesh: Any, names: Iterable[axes.AxisName]
) -> None:
  """Checks that a mesh has all axes.

  Raises:
    ValueError: if it lacks one, or is no mesh.
  """
  if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
    raise ValueError(
      f"{transform_name}: `mesh` must be a jax.sharding.Mesh, as from"
      f" jax.make_mesh((jax.device_count(),), ('data',)), got {mesh!r}."
    )
  missing = [name for name in names if name not in mesh.shape]
  if missing:
    raise ValueError(
      f"{transform_name}: the mesh has no axis {axes.listed(missing)}; it has"
      f" {dict(mesh.shape) or 'none: give `mesh`, or use jax.set_mesh(mesh)'}."
    )


def check_context(
  transform_name: str, mesh: Any, names: Iterable[axes.AxisName]
) -> None:
  """Checks that a map over the axes ``names`` of ``mesh`` may begin here.

  Raises:
    ValueError: if it is in a map over one of them, or jax.set_mesh has another mesh.
  """
  again = set(names) & axes.bound_axes().keys()
  if again:
    raise ValueError(
      f"{transform_name}: it is in a map over axis {axes.listed(again)} already, such"
      " as train_step, under_jit or jax.shard_map. Give that the transformation"
      f" itself, without {transform_name}."
    )
  context = jax.sharding.get_abstract_mesh()
  here = getattr(mesh, "abstract_mesh", mesh)
  if context.empty or mesh is None:
    return
  types = zip(context.axis_types, here.axis_types, strict=False)
  manual = jax.sharding.AxisType.Manual
  if dict(context.shape) != dict(here.shape) or any(
    a not in (b, manual) for a, b in types
  ):
    raise ValueError(
      f"{transform_name}: jax.set_mesh has another mesh, {context}, than `mesh`,"
      f" {here}: give this one to jax.set_mesh, or call it outside of jax.set_mesh."
    )


def check_rows(
  transform_name: str, what: str, tree: Any, mesh: Any, levels: Sequence
) -> None:
  """Checks the leading axes of arrays of each replica.

  Raises:
    ValueError: if one has others; names it.
  """
  expected = tuple(math.prod(mesh.shape[n] for n in names) for names in levels)
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.shape(leaf)[: len(levels)] != expected:
      raise ValueError(
        f"{transform_name}: {what}{jax.tree_util.keystr(path)} has shape"
        f" {jnp.shape(leaf)}, but must have leading axes of {expected}, the"
        " replicas: give each replica's own."
      )


def _check_placed(
  what: str, tree: Any, specs: Any, explicit: set[axes.AxisName]
) -> None:
  """Checks how arrays are sharded over Explicit axes, which shard_map requires."""

  def over_explicit(spec: Any, ndim: int) -> list[list[Any]]:
    entries = [*spec, *[None] * (ndim - len(spec))]
    names = [axes.names_in([entry]) for entry in entries]
    return [[n for n in of_dim if n in explicit] for of_dim in names]

  def check(path: Any, x: Any, spec: Any) -> None:
    own = jax.typeof(x).sharding.spec
    ndim = jnp.ndim(x)
    if over_explicit(own, ndim) != over_explicit(spec, ndim):
      name = f"{what}{jax.tree_util.keystr(path)}"
      raise ValueError(
        f"{_NAME}: {name} is sharded as {own}, but must be sharded as {spec}"
        f" over the mesh's Explicit axes: use optax_dist.states.place({what}, mesh,"
        " specs), with the specs of optax_dist.states.state_specs for a state."
      )

  if explicit:
    by_leaf = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    jax.tree_util.tree_map_with_path(check, tree, by_leaf)


def _rows(depth: int, tree: Any) -> Any:
  """Takes this replica's row of its blocks."""
  return jax.tree.map(lambda x: x[(0,) * depth], tree)


def _blocks(depth: int, tree: Any) -> Any:
  return jax.tree.map(lambda x: jnp.asarray(x)[(None,) * depth], tree)


def split_arguments(extra_args: dict, by_replica: Any, take: Any) -> Any:
  """Returns the arrays in keyword arguments, their specs and labels, and the inverse.

  Args:
    extra_args: the keyword arguments of ``update``.
    by_replica: the spec of a :class:`PerReplica`.
    take: takes one replica's block of it, inside the map.
  """
  treedef: Any
  paths, treedef = jax.tree_util.tree_flatten_with_path(
    extra_args, is_leaf=is_per_replica
  )
  leaves = [x for _, x in paths]
  at = [
    i for i, x in enumerate(leaves) if is_per_replica(x) or hasattr(x, "shape")
  ]
  arrays = [leaves[i] for i in at]
  labels = [argument(paths[i][0][0].key) for i in at]
  specs = [by_replica if is_per_replica(x) else PartitionSpec() for x in arrays]

  def rebuild(arrays: list[Any]) -> dict[str, Any]:
    taken = list(leaves)
    for i, x in zip(at, arrays, strict=True):
      taken[i] = take(x.value) if is_per_replica(x) else x
    return treedef.unflatten(taken)

  return arrays, specs, labels, rebuild
