"""Stock transformations on sparse updates.

Most of optax maps over leaves, and a sparse update is two of them. JAX refuses
to compute with the leaf that holds the indices (see
:class:`optax_dist.sparse.IndexedSlices`), so such transformations must be wrapped
in :func:`row_wise` or come after :func:`to_dense`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import checks, indexed_slices
from optax_dist._internal.indexed_slices import as_dense, is_indexed_slices


def row_wise(
  inner: optax.GradientTransformation, *, sum_duplicates: bool = True
) -> optax.GradientTransformationExtraArgs:
  """Applies a transformation to the touched rows of sparse updates.

  ``inner`` sees each :class:`~optax_dist.IndexedSlices` as the array of its
  values, with the same rows of the parameter and of its own state. So scaling,
  schedules, clipping and norms give the same numbers as for the dense update, at
  the cost of the rows. Momentum, Adam and other transformations with a state for
  each row are "lazy", as in TensorFlow's kernels for sparse gradients: other rows
  are unchanged, state included (an untouched momentum does not decay)::

    optax.chain(
        optax_dist.cross_shard("data"),
        optax_dist.sparse.row_wise(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
        ),
    )

  Dense updates are passed to ``inner`` unchanged. A ``None`` leaves its state
  unchanged. Under ``jax.jit`` with a donated state the cost is that of the rows,
  not of the table.

  Args:
    inner: The transformation. For the same numbers as on the rows alone, each
      element of its output may depend on the update, the parameter and the state
      at the same position, on scalars of the state, and on norms.
    sum_duplicates: Whether to sum repeated indices first. It may only be False
      if the rule is linear in the gradient and keeps no state.

  Returns:
    A transformation with the state of ``inner``. Its updates have ``None`` and
    :class:`~optax_dist.IndexedSlices` in the same places as the gradients, in
    the dtypes of the parameters, if these are given; apply them with
    ``optax_dist.apply_updates``.

  Source: TensorFlow's ``ResourceSparseApply*`` kernels, and
  ``Optimizer._resource_apply_sparse_duplicate_indices``.

  Example:
    >>> import jax.numpy as jnp
    >>> from optax_dist import sparse
    >>> params = jnp.zeros((3, 1))
    >>> optimizer = sparse.row_wise(optax.sgd(1.0, momentum=0.5))
    >>> state = optimizer.init(params)
    >>> grad = sparse.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (3, 1))
    >>> for _ in range(2):
    ...   updates, state = optimizer.update(grad, state)
    ...   params = sparse.apply_updates(params, updates)
    >>> params[:, 0].tolist()
    [0.0, 0.0, -2.5]
  """
  checks.transformation("inner", inner)
  checks.flag("sum_duplicates", sum_duplicates)
  inner = _with_own_dtypes(optax.with_extra_args_support(inner))

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    leaves, treedef = flatten_gradients(updates)
    if params is not None:
      param_leaves = treedef.flatten_up_to(params)
      leaves = [
        as_parameter_dtype(leaf, param, functools.partial(name_of, treedef, i))
        for i, (leaf, param) in enumerate(
          zip(leaves, param_leaves, strict=True)
        )
      ]
    if not any(leaf is None or is_indexed_slices(leaf) for leaf in leaves):
      updates = jax.tree.unflatten(treedef, leaves)
      return inner.update(updates, state, params, **extra_args)
    if sum_duplicates:
      leaves = [
        indexed_slices.sum_duplicates(leaf) if is_indexed_slices(leaf) else leaf
        for leaf in leaves
      ]

    def read(tree: Any) -> Any:
      arrays = zip(treedef.flatten_up_to(tree), leaves, strict=True)
      return treedef.unflatten([read_rows(*pair) for pair in arrays])

    def write(tree: Any, new: Any) -> Any:
      arrays = zip(*map(treedef.flatten_up_to, (tree, new)), strict=True)
      return treedef.unflatten(
        [
          write_rows(old, leaf, rows)
          for (old, rows), leaf in zip(arrays, leaves, strict=True)
        ]
      )

    trees: list[Any] = []

    def keep_and_read(tree: Any) -> Any:
      trees.append(tree)
      return read(tree)

    row_state = _map_parameter_trees(inner, keep_and_read, state)
    row_updates, row_state = inner.update(
      treedef.unflatten(map(indexed_slices.values_of, leaves)),
      row_state,
      None if params is None else read(params),
      **extra_args,
    )
    old: Iterator[Any] = iter(trees)
    state = _map_parameter_trees(
      inner, lambda rows: write(next(old), rows), row_state
    )
    row_updates = treedef.flatten_up_to(row_updates)
    return treedef.unflatten(map(like_gradient, row_updates, leaves)), state

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
  return optax.stateless(lambda updates, params: as_dense(updates))


def flatten_gradients(updates: optax.Updates) -> tuple[list[Any], Any]:
  """Flattens gradients; ``None`` and IndexedSlices are one leaf each."""
  return jax.tree.flatten(
    updates,
    is_leaf=lambda x: x is None or is_indexed_slices(x),
  )


def as_parameter_dtype(
  gradient: Any, parameter: Any, name: Callable[[], str]
) -> Any:
  """Casts a gradient, dense, sparse or ``None``, to its parameter's dtype.

  It keeps the state's dtypes; TensorFlow requires them to be equal.

  Args:
    gradient: The gradient.
    parameter: The parameter, or a slot of it.
    name: Returns the name of the gradient, for messages.

  Raises:
    TypeError: If the parameter is not floating-point or complex, or if it is real
      and its gradient complex.
  """
  if gradient is None or parameter is None:
    return gradient
  dtype = jnp.result_type(parameter)
  if not jnp.issubdtype(dtype, jnp.inexact):
    raise TypeError(
      f"{name()} is the gradient of a parameter of dtype {dtype}, which no"
      " optimizer can move. Leave it out (None, optax.masked or optax.partition)."
    )
  values = indexed_slices.values_of(gradient)
  if jnp.iscomplexobj(values) and not jnp.iscomplexobj(parameter):
    raise TypeError(
      f"{name()}, the gradient of a parameter of dtype {dtype}, must be real, got"
      f" {jnp.result_type(values)}"
    )
  return indexed_slices.map_values(lambda x: jnp.asarray(x, dtype), gradient)


def name_of(treedef: Any, index: int) -> str:
  """Returns the name of a gradient for messages: ``updates['w']``."""
  paths = jax.tree_util.tree_leaves_with_path(
    treedef.unflatten(range(treedef.num_leaves))
  )
  return "updates" + jax.tree_util.keystr(paths[index][0])


def read_rows(array: Any, gradient: Any) -> Any:
  """Reads the rows that a gradient touches.

  All of the array, if the gradient is dense or the array has no row for each of
  the parameter's; None, if there is no gradient.
  """
  if gradient is None or not _has_rows_of(array, gradient):
    return None if gradient is None else array
  # Unused slots read the last row; their results are dropped.
  return jnp.asarray(array).at[gradient.indices].get(mode="clip")


def write_rows(array: Any, gradient: Any, rows: Any) -> Any:
  """Replaces what :func:`read_rows` reads."""
  if gradient is None or not _has_rows_of(array, gradient):
    return array if gradient is None else rows
  return jnp.asarray(array).at[gradient.indices].set(rows, mode="drop")


def _has_rows_of(array: Any, gradient: Any) -> bool:
  if not is_indexed_slices(gradient):
    return False
  return jnp.shape(array)[:1] == gradient.dense_shape[:1]


def like_gradient(update: jax.Array, gradient: Any) -> Any:
  """Converts an update of the touched rows to the form of the gradient."""
  if not is_indexed_slices(gradient):
    return update
  return indexed_slices.map_values(
    lambda _: jnp.where(gradient.valid, update, 0), gradient
  )


def _with_own_dtypes(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Keeps dtypes where hyperparameters are arrays of a wider one.

  So they are from ``optax.inject_hyperparams``: float32 if any parameter is.
  """

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    new = inner.update(updates, state, params, **extra_args)
    old = updates, state
    treedefs: list[Any] = [jax.tree.structure(x) for x in (new, old)]
    if treedefs[0] != treedefs[1]:
      return new
    return jax.tree.map(_in_dtype_of, new, old)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _in_dtype_of(x: Any, y: Any) -> Any:
  dtype = jnp.result_type(y)
  if jnp.result_type(x) == dtype or not jnp.issubdtype(dtype, jnp.inexact):
    return x
  return jnp.asarray(x, dtype)


def _map_parameter_trees(
  transformation: optax.GradientTransformation,
  fun: Callable[[Any], Any],
  state: optax.OptState,
) -> optax.OptState:
  """Maps a function over the parts of a state that mirror the parameters.

  ``fun`` gets each such tree as a whole, always in the same order.
  """
  return optax.tree_utils.tree_map_params(
    transformation, fun, state, is_leaf=lambda _: True
  )
