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

from optax_dist._internal import axes, checks
from optax_dist._internal.replica_blocks import (
  PerReplica,
  block,
  has_center,
  is_per_replica,
  row,
)
from optax_dist.sparse.indexed_slices import apply_updates
from optax_dist.states.specs import state_specs
from optax_dist.transforms.under_jit import (
  check_mesh,
  split_arguments,
  under_jit,
)

_USER = "train_step"


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

  Args:
    loss: takes one replica's parameters and its rows of the batch; returns a scalar,
      the mean over these rows. It must not use ``axis_name``.
    tx: a transformation that communicates over ``axis_name``, alone or in a chain.
    mesh: the mesh. Axes besides ``axis_name`` are left to the compiler.
    axis_name: the mesh axis, or a sequence of axes, over the replicas.
    has_aux: whether ``loss`` returns ``(scalar, aux)``, with a pytree of
      floating-point arrays, such as an accuracy, that is averaged too.

  Returns:
    A :class:`TrainStep`.

  Raises:
    ValueError: if an argument is invalid, or ``mesh`` lacks an axis; in the step, if
      the number of rows is not a multiple of the number of replicas.

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
  checks.transformation("tx", tx)
  checks.flag("has_aux", has_aux)
  names = axes.canonical_names(axis_name)
  check_mesh(_USER, mesh, names)
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
    """
    own = self._has_own_params(params)
    count = math.prod(self.mesh.shape[name] for name in self.names)
    rows = lambda x: jnp.broadcast_to(x, (count, *x.shape))
    copy = jax.jit(
      lambda params: jax.tree.map(rows if own else jnp.copy, params),
      out_shardings=jax.NamedSharding(self.mesh, self._spec(own)),
    )
    params = copy(params)
    init = under_jit(self.tx, self.names, mesh=self.mesh, own_params=own).init
    return params, jax.jit(init)(params)

  def __call__(
    self, params: Any, opt_state: Any, batch: Any, **extra_args: Any
  ) -> tuple[Any, ...]:
    """Returns the next parameters and state, and the replicas' mean loss.

    Args:
      params: from :meth:`init` or the last step, like the state; both are donated.
      opt_state: the state.
      batch: a pytree of arrays with rows along their first axis, which are divided
        among the replicas.
      **extra_args: passed to ``tx``; those of each replica, such as ``arrived``, as
        a :class:`optax_dist.PerReplica` with a leading replica axis.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
      count = math.prod(self.mesh.shape[name] for name in self.names)
      if not jnp.ndim(x) or x.shape[0] % count:
        raise ValueError(
          f"{_USER}: batch{jax.tree_util.keystr(path)} has shape {jnp.shape(x)},"
          f" but its rows must be a multiple of {count} replicas."
        )
    by_replica = jax.NamedSharding(self.mesh, self._spec(True))
    batch, extra_args = jax.tree.map(
      lambda x: jax.device_put(x, by_replica) if is_per_replica(x) else x,
      (PerReplica(batch), extra_args),
      is_leaf=is_per_replica,
    )
    return self._step(params, opt_state, batch.value, extra_args)

  @functools.cached_property
  def _step(self) -> Callable[..., Any]:
    return jax.jit(self._mapped, donate_argnums=(0, 1))

  def _mapped(
    self, params: Any, opt_state: Any, batch: Any, extra_args: dict[str, Any]
  ) -> tuple[Any, ...]:
    own = has_center(opt_state)
    of_params, of_batch = self._spec(own), self._spec(True)
    of_state = state_specs(opt_state, self.names)
    arrays, of_arrays, rebuild = split_arguments(extra_args, of_batch, row)

    def one_replica(
      params: Any, opt_state: Any, batch: Any, arrays: list[Any]
    ) -> tuple[Any, ...]:
      params = row(params) if own else params
      value, grads = jax.value_and_grad(self.loss, has_aux=self.has_aux)(
        params, batch
      )
      updates, opt_state = self.tx.update(
        grads, opt_state, params, **rebuild(arrays)
      )
      params = apply_updates(params, updates)
      params = block(params) if own else params
      return params, opt_state, jax.lax.pmean(value, self.names)

    return jax.shard_map(
      one_replica,
      mesh=self.mesh,
      in_specs=(of_params, of_state, of_batch, of_arrays),
      out_specs=(of_params, of_state, PartitionSpec()),
      axis_names=set(self.names),
      # A loss may start a loop from zeros, which are typed as equal everywhere.
      check_vma=False,
    )(params, opt_state, batch, arrays)

  def _has_own_params(self, params: Any) -> bool:
    """Whether the state for such parameters has a center, and so they are own."""
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      return has_center(jax.eval_shape(self.tx.init, params))

  def _spec(self, own: bool) -> PartitionSpec:
    names = self.names if len(self.names) > 1 else self.names[0]
    return PartitionSpec(names) if own else PartitionSpec()
