"""Stock transformations on sparse updates.

Most of optax maps over leaves, and a sparse update is two of them. JAX refuses
to compute with the leaf that holds the indices (see
:mod:`optax_dist.sparse.indexed_slices`), so transformations that scale or clip
must be wrapped in :func:`on_values`, and those with a state per parameter must
come after :func:`to_dense`, or from :mod:`optax_dist.optimizers`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.sparse import indexed_slices
from optax_dist.sparse.indexed_slices import is_indexed_slices


def on_values(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Applies a transformation to the values of sparse updates, not the indices.

  ``inner`` sees each :class:`~optax_dist.IndexedSlices` as the array of its
  values, with repeated indices summed first, and the same rows of the
  parameter. So scaling, schedules, clipping and norms give the same numbers as
  for the dense update, at the cost of the rows. Dense updates and ``None`` are
  passed to ``inner`` unchanged::

    optax.chain(
        optax_dist.cross_shard("data"),
        optax_dist.sparse.on_values(
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule))
        ),
    )

  Transformations that are not functions of the row alone (weight decay) act on
  the touched rows only.

  Args:
    inner: A transformation whose state does not depend on how many rows a
      parameter has: a count is fine, a momentum is not.

  Returns:
    A transformation with the state of ``inner``. Apply its updates with
    ``optax_dist.apply_updates``.

  Raises:
    ValueError: In ``update``, if an update is sparse and the state of
      ``inner`` has rows, as of momentum and Adam.

  Example:
    >>> import jax.numpy as jnp, optax_dist
    >>> values, rows = jnp.array([3.0, 4.0]), jnp.array([7, 2])
    >>> update = optax_dist.IndexedSlices(values, rows, (9,))
    >>> tx = on_values(optax.clip_by_global_norm(1.0))
    >>> clipped, _ = tx.update(update, tx.init(jnp.zeros(9)))
    >>> clipped.indices.tolist(), clipped.values.round(1).tolist()
    ([2, 7], [0.800000011920929, 0.6000000238418579])
  """
  inner = optax.with_extra_args_support(inner)

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates, is_leaf=_is_leaf)
    if not any(map(is_indexed_slices, leaves)):
      return inner.update(updates, state, params, **extra_args)
    _check_stateless(inner, leaves, treedef)
    leaves = [
      indexed_slices.sum_duplicates(x) if is_indexed_slices(x) else x
      for x in leaves
    ]
    if params is not None:
      params = treedef.unflatten(
        map(_rows_of, treedef.flatten_up_to(params), leaves)
      )
    values = treedef.unflatten(map(indexed_slices.values_of, leaves))
    updates, state = inner.update(values, state, params, **extra_args)
    updates = map(_like, treedef.flatten_up_to(updates), leaves)
    return treedef.unflatten(updates), state

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def to_dense() -> optax.GradientTransformation:
  """Makes sparse updates dense, for the transformations that follow it.

  The cost of each step is then proportional to the tables, as with dense
  gradients.

  Returns:
    A stateless transformation.

  Example:
    >>> import jax.numpy as jnp, optax_dist
    >>> update = optax_dist.IndexedSlices(jnp.ones(2), jnp.array([1, 1]), (3,))
    >>> tx = optax.chain(to_dense(), optax.sgd(0.5, momentum=0.9))
    >>> tx.update(update, tx.init(jnp.zeros(3)))[0].tolist()
    [-0.0, -1.0, -0.0]
  """

  def dense(updates: Any, params: Any) -> Any:
    del params
    return jax.tree.map(
      lambda x: x.to_dense() if is_indexed_slices(x) else x,
      updates,
      is_leaf=is_indexed_slices,
    )

  return optax.stateless(dense)


def global_norm(updates: optax.Updates) -> jax.Array:
  """Like ``optax.tree.norm``, for updates of which some may be sparse.

  Args:
    updates: Tree of arrays, :class:`~optax_dist.IndexedSlices` and ``None``.

  Returns:
    The norm of the dense updates, a scalar.

  Example:
    >>> import jax.numpy as jnp, optax_dist
    >>> update = optax_dist.IndexedSlices(jnp.ones(2), jnp.array([5, 7]), (9,))
    >>> round(float(global_norm({"table": update})), 4)
    1.4142
  """
  return optax.tree.norm(
    jax.tree.map(
      lambda x: (
        indexed_slices.sum_duplicates(x).values if is_indexed_slices(x) else x
      ),
      updates,
      is_leaf=is_indexed_slices,
    )
  )


def _is_leaf(x: Any) -> bool:
  return x is None or is_indexed_slices(x)


def _rows_of(param: Any, update: Any) -> Any:
  if not is_indexed_slices(update):
    return param
  return jnp.asarray(param).at[update.indices].get(mode="fill", fill_value=0)


def _like(values: Any, update: Any) -> Any:
  if not is_indexed_slices(update):
    return values
  return indexed_slices.map_values(
    lambda _: jnp.where(update.valid, values, jnp.zeros_like(values)), update
  )


def _check_stateless(
  inner: optax.GradientTransformation, leaves: list[Any], treedef: Any
) -> None:
  """Raises an error if the state of ``inner`` has as many rows as a table."""

  def shapes(more_rows: int) -> list[Any]:
    def like(x: Any) -> Any:
      if not is_indexed_slices(x):
        return x
      shape = (x.dense_shape[0] + more_rows, *x.dense_shape[1:])
      return jax.ShapeDtypeStruct(shape, x.dtype)

    state = jax.eval_shape(inner.init, treedef.unflatten(map(like, leaves)))
    return jax.tree_util.tree_leaves_with_path(state)

  for (path, one), (_, other) in zip(shapes(0), shapes(1), strict=True):
    if one.shape != other.shape:
      raise ValueError(
        f"on_values: the state of `inner` at state{jax.tree_util.keystr(path)}"
        " has a row for each row of a table, but sparse updates hold other rows"
        " at each step. Put optax_dist.sparse.to_dense() before it, or let"
        " optax_dist.optimizers.row_wise(inner), or an optimizer of"
        " optax_dist.optimizers, update the touched rows of its state."
      )
