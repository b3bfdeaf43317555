"""A whole training step, from a loss, a transformation and a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_dist._internal import axes, checks, collectives, replication
from optax_dist._internal.extra_args import of_all
from optax_dist._internal.indexed_slices import apply_updates
from optax_dist._internal.leaves import precision
from optax_dist._internal.placement.place import place
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  block,
  has_center,
  has_replicas,
  is_per_replica,
  nodes,
  row,
)
from optax_dist._internal.placement.specs import is_spec, state_specs
from optax_dist._internal.replica_params import strong
from optax_dist.transforms import _variables
from optax_dist.transforms._agreement import (
  PARAMS,
  STATE,
  VARIABLES,
  Refusal,
)
from optax_dist.transforms.cross_shard import cross_shard
from optax_dist.transforms.under_jit import (
  check_context,
  check_mesh,
  check_rows,
  split_arguments,
  under_jit,
)

_NAME = "train_step"


def train_step(
  loss: Callable[[Any, Any], Any],
  tx: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  axis_name: axes.AxisNames,
  *,
  has_aux: bool = False,
) -> "TrainStep":
  """Returns a jitted training step that places everything on the mesh itself.

  It does what a step written with ``jax.shard_map`` does, with the same numbers and
  collectives: each replica computes the loss of its rows of the batch and its own
  gradient, ``tx`` aggregates, and the updates are applied. Which parts of the state,
  and of the parameters, belong to one replica follows from ``tx``.

  ``step.init(params)`` returns parameters and a state in their final sharding, and
  ``step(params, opt_state, batch)`` the next ones and the loss. Both are donated: use
  the results only. With ``elastic_average``, ``local_updates``, ``diloco`` and other
  transformations with a center, each replica has its own parameters: they have a
  leading replica axis from ``init`` on; see :func:`optax_dist.center_params`.

  What all replicas share must be equal on all of them. So the traced step is checked
  once: a parameter or a part of the state that would differ between replicas, because
  nothing has reduced what it is computed from, is an error that names it, and so is
  communication that only some replicas would reach.

  ``tx`` gets the mean loss as ``value``, for ``optax.contrib.reduce_on_plateau`` and
  others that take it. If all replicas share the parameters, it also gets what a line
  search needs, as in ``optax.chain(optax_dist.cross_shard("data"), optax.lbfgs())``.

  The parameters may be those of a Flax model that has other variables too. These are
  not trained, but carried along, equal on all replicas: floating-point ones, such as
  the statistics of batch normalization, are averaged in each step, and each replica
  draws from random streams of its own, the first one as one device alone would:

  - an nnx module, or a tree of them, of which ``nnx.Param`` is trained. The loss gets
    it and may change its variables; ``init`` and the step return one.
  - the collections of a linen module, ``{"params": ..., "batch_stats": ...}``, of which
    ``params`` are trained. The loss returns ``(scalar, updates)``, with the collections
    that ``apply(..., mutable=...)`` returns (with ``has_aux``, ``(scalar, (updates,
    aux))``).

  Args:
    loss: takes one replica's parameters and its rows of the batch; returns a scalar,
      the mean over these rows. It must not use ``axis_name``.
    tx: a transformation that communicates over ``axis_name``, alone or in a chain.
    mesh: the mesh. Axes besides ``axis_name`` are left to the compiler.
    axis_name: the mesh axis, or a sequence of axes, over the replicas.
    has_aux: whether ``loss`` returns ``(scalar, aux)``, with a pytree of arrays. The
      step returns each replica's, with a leading replica axis, for you to reduce:
      ``aux["accuracy"].mean()``, ``aux["examples"].sum()``.

  Returns:
    A :class:`TrainStep`.

  Raises:
    ValueError: if an argument is invalid, or ``mesh`` lacks an axis; in the step, if
      the number of rows is not a multiple of the number of replicas, or if the
      replicas would not agree, as above.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> step = optax_dist.train_step(
    ...   lambda w, x: jnp.mean((x @ w - 1.0) ** 2),
    ...   optax.chain(optax_dist.cross_shard("data"), optax.sgd(0.25)),
    ...   mesh, "data",
    ... )
    >>> params, opt_state = step.init(jnp.zeros(2))
    >>> params, opt_state, loss = step(params, opt_state, jnp.ones((8, 2)))
    >>> params, loss
    (Array([0.5, 0.5], dtype=float32), Array(1., dtype=float32))
  """
  checks.function("loss", loss)
  checks.transformation("tx", tx)
  checks.flag("has_aux", has_aux)
  names = axes.canonical_names(axis_name)
  check_mesh(_NAME, mesh, names)
  if isinstance(mesh, jax.sharding.AbstractMesh):
    raise ValueError(f"{_NAME}: `mesh` must have devices, got {mesh}.")
  tx = optax.with_extra_args_support(tx)
  return TrainStep(loss, tx, mesh, names, has_aux)


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """A training step of :func:`train_step`, whose arguments are its attributes."""

  loss: Callable[[Any, Any], Any]
  tx: optax.GradientTransformationExtraArgs
  mesh: jax.sharding.Mesh
  names: tuple[axes.AxisName, ...]
  has_aux: bool

  def init(self, params: optax.Params) -> tuple[optax.Params, optax.OptState]:
    """Returns parameters and a state, in their final sharding.

    Args:
      params: one replica's parameters, from which all replicas start; not donated.
        If they are sharded over further axes of the mesh, they stay so, and the
        state is sharded like them.
    """
    check_context(_NAME, self.mesh, self.names)
    form, params, carried = _variables.split(_NAME, params)
    own = self._has_own_params(params)
    of_model = jax.tree.map(self._model_spec, params)
    of_params = jax.tree.map(
      lambda spec: PartitionSpec(*self._spec(own), *spec),
      of_model,
      is_leaf=is_spec,
    )
    trained = self._start(params, of_model, of_params, own)
    shared = jax.tree.map(self._model_spec, carried)
    carried = self._start(carried, shared, shared, False)
    tx = under_jit(self.tx, self.names, mesh=self.mesh, own_params=own)
    shardings = self._state_shardings(params, of_model)
    start = jax.jit(lambda x: strong(tx.init(x)), out_shardings=shardings)
    state = start(trained)
    return form.merge(trained, carried), state

  def __call__(
    self, params: Any, opt_state: Any, batch: Any, **extra_args: Any
  ) -> tuple[Any, ...]:
    """Returns the next parameters and state, and the replicas' mean loss.

    With ``has_aux``, the loss is a tuple of the mean loss and what each replica's
    returned besides.

    If ``tx`` drops what is not finite, as ``sync_replicas`` does, the mean is over
    the replicas whose loss is finite; it is NaN if none is. Variables that are
    carried along are averaged over the same replicas.

    Args:
      params: from :meth:`init` or the last step, like the state; both are donated.
      opt_state: the state.
      batch: a pytree of arrays with rows along their first axis, which are divided
        among the replicas.
      **extra_args: passed to ``tx``; those of each replica, such as ``arrived``, as
        a :class:`optax_dist.PerReplica` with a leading replica axis. ``value``, the
        mean loss, and what a line search needs are passed without being given.
    """
    check_context(_NAME, self.mesh, self.names)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
      count = self._count()
      if not jnp.ndim(x) or x.shape[0] % count:
        raise ValueError(
          f"{_NAME}: batch{jax.tree_util.keystr(path)} has shape {jnp.shape(x)},"
          f" but its rows must be a multiple of {count} replicas."
        )
    by_replica = jax.NamedSharding(self.mesh, self._spec(True))
    batch, extra_args = jax.tree.map(
      lambda x: jax.device_put(x, by_replica) if is_per_replica(x) else x,
      (PerReplica(batch), extra_args),
      is_leaf=is_per_replica,
    )
    form, trained, carried = _variables.split(_NAME, params)
    step, kept = self._step((trained, opt_state, carried))
    kept, loss = step(form, kept, batch.value, extra_args)
    trained, opt_state, carried = kept
    return form.merge(trained, carried), opt_state, loss

  def _step(self, kept: Any) -> tuple[Callable[..., Any], Any]:
    """Returns the jitted step and its arguments; the results get the same shardings.

    Arguments that come from the host or a checkpoint, not from a step, are placed.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(kept)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
      return self._mapped, kept
    current = treedef, [getattr(x, "sharding", None) for x in leaves]
    for shardings, step in self._steps:
      if shardings == current:
        return step, kept
    placed = self._placed(kept)
    shardings = jax.tree.map(lambda x: x.sharding, placed)
    key = treedef, jax.tree.leaves(shardings)
    if key != current:
      return self._step(placed)
    step = jax.jit(
      self._mapped,
      static_argnums=0,
      donate_argnums=1,
      out_shardings=(shardings, None),
    )
    self._steps.append((key, step))
    return step, placed

  @functools.cached_property
  def _steps(self) -> list[tuple[Any, Callable[..., Any]]]:
    """The jitted steps, each with the structure and the shardings of its arguments.

    A list, since there is usually one step, and comparing many shardings is faster than
    hashing them.
    """
    return []

  def _mapped(
    self,
    form: _variables.Arrays,
    kept: tuple[Any, Any, Any],
    batch: Any,
    extra_args: dict[str, Any],
  ) -> tuple[tuple[Any, Any, Any], Any]:
    opt_state = kept[1]
    own = has_center(opt_state)
    of_kept = self._specs(kept)
    arrays, of_arrays, labels, rebuild = split_arguments(
      extra_args, self._spec(True), row
    )
    counters = optax.tree.get_all_with_path(opt_state, "dropped_nonfinite")
    drops = own or bool(counters)

    def one_replica(
      params: Any, opt_state: Any, carried: Any, batch: Any, arrays: list[Any]
    ) -> tuple[Any, ...]:
      params = row(params) if own else params
      variables = _variables.of_replica(carried, self.names)
      loss = lambda params: form.call(
        self.loss, self.has_aux, params, variables, batch
      )
      (value, (new, aux)), grads = jax.value_and_grad(loss, has_aux=True)(
        params
      )
      counts = _all_finite((value, new)) if drops else None
      mean = functools.partial(_mean, counts, self.names)
      (value,) = mean([value], [jnp.full_like(value, jnp.nan)])
      carried = _variables.of_all(_NAME, carried, variables, new, mean)
      searched = None if own else lambda params: loss(params)[0]
      updates, state = self._update(
        searched, value, grads, opt_state, params, rebuild(arrays)
      )
      treedefs: list[Any] = [jax.tree.structure(x) for x in (opt_state, state)]
      if treedefs[0] != treedefs[1]:
        raise ValueError(
          f"{_NAME}: `tx` returns a state of another structure than it was given:"
          f" {treedefs[1]} instead of {treedefs[0]}. Use a transformation that"
          " keeps it."
        )
      params = apply_updates(params, updates)
      params = block(params) if own else params
      aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
      return params, state, carried, value, aux

    params, opt_state, carried, value, aux = replication.shard_map(
      one_replica,
      mesh=self.mesh,
      in_specs=(*of_kept, self._spec(True), of_arrays),
      out_specs=(*of_kept, PartitionSpec(), self._spec(True)),
      axis_names=set(self.names),
      labels=("parameters", "state", "variables", "batch", labels),
      refuse=Refusal(_NAME, self.names, (PARAMS, STATE, VARIABLES)),
    )(*kept, batch, arrays)
    return (params, opt_state, carried), (value, aux) if self.has_aux else value

  def _update(
    self,
    loss: Callable[[Any], Any] | None,
    value: jax.Array,
    grads: Any,
    opt_state: Any,
    params: Any,
    extra_args: dict[str, Any],
  ) -> tuple[Any, Any]:
    """Calls ``tx``, with the mean loss if it takes it.

    Args:
      loss: this replica's, of parameters; None if each replica has its own.
      value: the mean loss.
      grads: this replica's gradient.
      opt_state: the state.
      params: the parameters.
      extra_args: the caller's keyword arguments.
    """
    update = functools.partial(self.tx.update, grads, opt_state, params)
    try:
      return update(**{"value": value} | extra_args)
    except TypeError as error:
      if "unexpected keyword argument 'value'" in str(error):
        return update(**extra_args)
      # A line search requires `value_fn`, as in optax.lbfgs.
      if "'value_fn'" not in str(error):
        raise
      if loss is None:
        raise ValueError(
          f"{_NAME}: `tx` has a line search, and each replica has parameters of"
          " its own, so there is no common line. Use a learning rate instead, as"
          " in optax.lbfgs(1.0, linesearch=None)."
        ) from error
    common = of_all(self.names, {"grad": grads, "value_fn": loss})
    common["value"] = value
    return update(**common | extra_args)

  def _has_own_params(self, params: Any) -> bool:
    """Whether the state for such parameters has a center, and so they are own."""
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      state = jax.eval_shape(self.tx.init, params)
    if any(has_replicas(x.value) for x in nodes(state, is_per_replica)):
      raise ValueError(
        f"{_NAME}: `tx` has replicas that consist of replicas, as with"
        " sync_replicas inside of diloco. Use optax_dist.under_jit(...,"
        " inner_axes=...) in a step of your own."
      )
    return has_center(state)

  def _count(self) -> int:
    return math.prod(self.mesh.shape[name] for name in self.names)

  def _spec(self, own: bool) -> PartitionSpec:
    names = self.names if len(self.names) > 1 else self.names[0]
    return PartitionSpec(names) if own else PartitionSpec()

  def _specs(self, kept: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Returns the specs of parameters, a state and variables over the replicas."""
    params, opt_state, _ = kept
    own = has_center(opt_state)
    if own:
      check_rows(_NAME, "params", params, self.mesh, [self.names])
    of_state = state_specs(opt_state, self.names)
    return self._spec(own), of_state, PartitionSpec()

  def _placed(self, kept: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Places arrays that are not sharded over the replicas as they have to be."""

    def over_replicas(spec: PartitionSpec) -> list[tuple[int, axes.AxisName]]:
      each = [axes.names_in([entry]) for entry in spec]
      return [
        (i, n) for i, of in enumerate(each) for n in of if n in self.names
      ]

    def put(x: Any, spec: PartitionSpec) -> Any:
      sharding: Any = getattr(x, "sharding", None)
      on_mesh = getattr(sharding, "mesh", None) == self.mesh
      if on_mesh and over_replicas(sharding.spec) == over_replicas(spec):
        return x
      return place(x, self.mesh, spec)

    specs = jax.tree.broadcast(self._specs(kept), kept, is_leaf=is_spec)
    return jax.tree.map(put, kept, specs)

  def _model_spec(self, x: Any) -> PartitionSpec:
    """Returns how a parameter is sharded over the mesh's further axes."""
    sharding: Any = getattr(x, "sharding", None)
    spec: Any = ()
    if getattr(sharding, "mesh", None) in (self.mesh, self.mesh.abstract_mesh):
      spec = sharding.spec
    entries = []
    for entry in (*spec, *[None] * (jnp.ndim(x) - len(spec))):
      names = [n for n in axes.names_in([entry]) if n not in self.names]
      entries.append(tuple(names) if len(names) > 1 else (names or [None])[0])
    return PartitionSpec(*entries)

  def _start(self, tree: Any, of_one: Any, of_all: Any, own: bool) -> Any:
    """Returns copies of one replica's arrays, or a row of copies for each replica."""
    count = self._count()
    rows = lambda x: jnp.broadcast_to(x, (count, *x.shape))
    shardings = jax.tree.map(
      lambda spec: jax.NamedSharding(self.mesh, spec), of_all, is_leaf=is_spec
    )
    copy = jax.jit(
      lambda tree: jax.tree.map(rows if own else jnp.copy, strong(tree)),
      out_shardings=shardings,
    )
    return copy(place(tree, self.mesh, of_one))

  def _state_shardings(self, params: Any, of_model: Any) -> Any:
    """Returns how a state is sharded, if the compiler shards its parameters.

    Otherwise the types of parameters show how, or there is nothing to shard.
    """
    specs = jax.tree.leaves(of_model, is_leaf=is_spec)
    used = {name for spec in specs for name in axes.names_in(spec)}
    if not used - set(self.mesh.explicit_axes):
      return None
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
    )
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      state = jax.eval_shape(self.tx.init, shapes)
    by_model = state_specs(
      state, self.names, param_specs=of_model, params=shapes
    )

    def sharding(x: Any, spec: Any, plain: Any) -> jax.NamedSharding:
      try:
        result = jax.NamedSharding(self.mesh, spec)
        result.shard_shape(x.shape)
      except ValueError:
        return jax.NamedSharding(self.mesh, plain)
      return result

    return jax.tree.map(
      sharding, state, by_model, state_specs(state, self.names)
    )


def _all_finite(tree: Any) -> jax.Array:
  floats = [
    x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  return functools.reduce(
    jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in floats]
  )


def _mean(
  counts: jax.Array | None,
  names: tuple[axes.AxisName, ...],
  own: list[jax.Array],
  otherwise: list[jax.Array],
) -> list[jax.Array]:
  """Returns the means over the replicas.

  Args:
    counts: whether this replica counts; None for all of them.
    names: the axes over the replicas.
    own: this replica's arrays.
    otherwise: the results if none counts.
  """
  if counts is None:
    return cross_shard(names).update(own, optax.EmptyState())[0]
  sums, number = collectives.sum_counted(
    list(map(precision.for_sums, own)), counts, names
  )
  means = [total / number.astype(total.dtype) for total in sums]
  return [
    jnp.where(number > 0, precision.cast_like(x, like), like)
    for x, like in zip(means, otherwise, strict=True)
  ]
