"""Wrappers whose own state is per replica."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes
from optax_dist._internal import extra_args as arguments
from optax_dist._internal import inner as inner_transformation
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  as_block,
  has_replicas,
  is_per_replica,
  own_block,
)
from optax_dist._internal.placement.specs import children
from optax_dist._internal.replicas import Replicas

_NAME = "per_replica"


class OwnState(NamedTuple):
  """One replica's part of a state, see :func:`per_replica`.

  Attributes:
    local_step: calls of ``update`` so far (int32 scalar).
    value: a part of the wrapped transformation's state, or all of it.
  """

  local_step: jax.Array
  value: Any


def per_replica(
  tx: Any,
  axis_name: axes.AxisNames,
  *fields: str,
  num_replicas: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Marks state of any transformation as per replica.

  A transform before the communication sees each replica's own gradient, and so
  its state differs between replicas, which a stock transformation's state does
  not express. This wrapper marks it, so that :func:`optax_dist.states.state_specs` and
  :func:`optax_dist.states.state_axes` know it::

    tx = optax_dist.per_replica(
        optax.MultiSteps(
            optax.chain(optax_dist.cross_shard("data"), optax.adam(1e-3)), 4
        ),
        "data",
        "acc_grads",
    )

  accumulates each replica's own gradients of four calls. The other fields of a
  wrapper, its counters and the inner state, stay equal on all replicas: a
  counter that decides on communication has to be equal.

  Args:
    tx: a transformation, or an ``optax.MultiSteps``.
    axis_name: the axis, or a sequence of axes, over the replicas.
    *fields: names of fields in the state of ``tx`` that are per replica; none
      for all of the state, as for ``optax.trace`` in a chain before
      ``cross_shard``.
    num_replicas: the number of replicas; None for the size of the axis. It is
      required if ``init`` is called outside of the map and of ``jax.set_mesh``.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with the state of ``tx``, in
    which each marked part is a :class:`PerReplica` of an :class:`OwnState`. With
    ``fields`` the rest of the state is equal on all replicas, so ``value`` is
    averaged over them, and others must be equal, as in
    :func:`optax_dist.sync_replicas`.

  Raises:
    ValueError: at construction, if ``num_replicas`` is not a positive integer;
      in ``init``, if the number of replicas is unknown, if a field does not
      exist, or if a part to mark already contains marked parts.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax.chain(
    ...   optax_dist.per_replica(optax.trace(0.5), "data", num_replicas=2),
    ...   optax_dist.cross_shard("data"),
    ... )
    >>> state = tx.init(jnp.zeros(()))
    >>> state[0].value.value.trace
    Array([0., 0.], dtype=float32)
    >>> axes = optax_dist.states.state_axes(state)
    >>> update = jax.vmap(
    ...   tx.update, in_axes=(0, axes), out_axes=(0, axes), axis_name="data"
    ... )
    >>> updates, state = update(jnp.array([2.0, 4.0]), state)
    >>> updates, state[0].value.value.trace
    (Array([3., 3.], dtype=float32), Array([2., 4.], dtype=float32))
  """
  replicas = Replicas.of(_NAME, axis_name, num_replicas, ())
  if isinstance(tx, optax.MultiSteps):
    # Its gradient_transformation() does not pass keyword arguments on.
    tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
  tx = inner_transformation.checked(
    _NAME, tx, replicas.names, argument="tx", known=None, counts_steps=False
  )

  def init_fn(params: optax.Params) -> optax.OptState:
    count = replicas.at_init()

    def mark(part: Any) -> PerReplica:
      if has_replicas(part):
        raise ValueError(
          f"{_NAME}: {fields or 'the state'} has parts of one"
          " replica in it already, as that of sync_replicas. Name the fields of"
          " the wrapper's own state, as in per_replica(optax.MultiSteps(...),"
          ' axis_name, "acc_grads").'
        )
      own = OwnState(jnp.zeros([], jnp.int32), part)
      return replicas.start(own, count)

    return _on_parts(mark, tx.init(params), fields)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    replicas.in_update()
    steps = []

    def take(node: PerReplica) -> Any:
      own, leading = own_block(node, node.value.local_step, _NAME)
      steps.append((optax.safe_increment(own.local_step), leading))
      return own.value

    def put_back(part: Any) -> PerReplica:
      step, leading = steps.pop(0)
      own = axes.cast_to_varying(OwnState(step, part), replicas.names)
      return as_block(own, leading)

    if fields:
      arguments.check_equal(_NAME, replicas.names, extra_args)
      extra_args = arguments.of_all(replicas.names, extra_args)
    updates, state = tx.update(
      updates, _on_parts(take, state, fields), params, **extra_args
    )
    return updates, _on_parts(put_back, state, fields)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _on_parts(
  fun: Callable[[Any], Any], state: Any, fields: tuple[str, ...]
) -> Any:
  """Applies ``fun`` to the parts of a state named in ``fields``, or to all.

  For each name, only the outermost parts are used.

  Raises:
    ValueError: if there is no part with a name.
  """
  if not fields:
    return fun(state)
  missing, known = set(fields), set()

  def walk(node: Any) -> Any:
    if hasattr(node, "_fields") and not is_per_replica(node):
      known.update(node._fields)
      missing.difference_update(node._fields)
      return node._replace(
        **{
          name: fun(part) if name in fields else walk(part)
          for name, part in zip(node._fields, node, strict=True)
        }
      )
    if is_per_replica(node) or jax.tree_util.all_leaves([node]):
      return node
    parts, treedef = children(node)
    return treedef.unflatten(map(walk, parts))

  state = walk(state)
  if missing:
    raise ValueError(
      f"{_NAME}: the state has no field {', '.join(map(repr, sorted(missing)))};"
      f" it has {', '.join(sorted(known)) or 'none'}."
    )
  return state
