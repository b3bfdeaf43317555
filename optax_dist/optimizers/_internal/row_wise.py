"""Makes an elementwise optimizer lazy: sparse gradients only cost their rows.

For most optimizers, TensorFlow's kernels for sparse gradients apply the dense
rule to the touched rows of the variable and of its slots. This wrapper does the
same: it reads the touched rows of the optimizer's state, runs the dense rule on
them as if they were the parameter, and writes the rows of the state back.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal.leaves import update_leaves
from optax_dist.optimizers._internal import hyperparameters
from optax_dist.sparse import indexed_slices


def row_wise(
  inner: optax.GradientTransformation, *, sum_duplicates: bool = True
) -> optax.GradientTransformationExtraArgs:
  """Extends an elementwise transformation to sparse gradients and ``None``.

  Dense gradients are passed to ``inner`` unchanged. For an
  :class:`~optax_dist.IndexedSlices` it gets the touched rows, with the same
  rows of its state and of the parameter; other rows are unchanged, state
  included ("lazy"; an untouched momentum does not decay). Under ``jax.jit``
  with a donated state the cost is that of the rows, not of the table. A
  ``None`` gradient leaves its state unchanged.

  Args:
    inner: The transformation. Each element of its output may depend on the
      gradient, the parameter and the state at the same position and on scalars
      of the state, as in most of optax; a norm over a tensor would be taken
      over the touched rows.
    sum_duplicates: Whether to sum repeated indices first. It may only be False
      if the rule is linear in the gradient and keeps no state.

  Returns:
    A transformation with the state of ``inner``. Its updates have ``None`` and
    :class:`~optax_dist.IndexedSlices` in the same places as the gradients;
    apply them with ``optax_dist.apply_updates``.

  Source: TensorFlow's ``ResourceSparseApply*`` kernels, and
  ``Optimizer._resource_apply_sparse_duplicate_indices``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax_dist.sparse.indexed_slices as sparse
    >>> params = jnp.zeros((3, 1))
    >>> optimizer = row_wise(optax.sgd(1.0, momentum=0.5))
    >>> state = optimizer.init(params)
    >>> grad = sparse.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (3, 1))
    >>> for _ in range(2):
    ...   updates, state = optimizer.update(grad, state)
    ...   params = sparse.apply_updates(params, updates)
    >>> params[:, 0].tolist()
    [0.0, 0.0, -2.5]
  """
  inner = _with_own_dtypes(optax.with_extra_args_support(inner))

  def update_fn(updates, state, params=None, **extra_args):
    leaves, treedef = flatten_gradients(updates)
    if params is not None:
      param_leaves = treedef.flatten_up_to(params)
      leaves = [
        as_parameter_dtype(leaf, param, functools.partial(name_of, treedef, i))
        for i, (leaf, param) in enumerate(
          zip(leaves, param_leaves, strict=True)
        )
      ]
    if not any(
      leaf is None or indexed_slices.is_indexed_slices(leaf) for leaf in leaves
    ):
      updates = jax.tree.unflatten(treedef, leaves)
      return inner.update(updates, state, params, **extra_args)

    if sum_duplicates:
      leaves = [
        indexed_slices.sum_duplicates(leaf)
        if indexed_slices.is_indexed_slices(leaf)
        else leaf
        for leaf in leaves
      ]
    used = [i for i, leaf in enumerate(leaves) if leaf is not None]

    def read(tree):
      arrays = treedef.flatten_up_to(tree)
      return [read_rows(arrays[i], leaves[i]) for i in used]

    def write(tree, rows):
      arrays = treedef.flatten_up_to(tree)
      for i, new in zip(used, rows, strict=True):
        arrays[i] = write_rows(arrays[i], leaves[i], new)
      return jax.tree.unflatten(treedef, arrays)

    trees: list[Any] = []

    def keep_and_read(tree):
      trees.append(tree)
      return read(tree)

    row_state = _map_parameter_trees(inner, keep_and_read, state)
    row_updates, row_state = inner.update(
      [indexed_slices.values_of(leaves[i]) for i in used],
      row_state,
      None if params is None else read(params),
      **extra_args,
    )
    old: Iterator[Any] = iter(trees)
    state = _map_parameter_trees(
      inner, lambda rows: write(next(old), rows), row_state
    )
    for i, update in zip(used, row_updates, strict=True):
      leaves[i] = like_gradient(update, leaves[i])
    return jax.tree.unflatten(treedef, leaves), state

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def flatten_gradients(updates: optax.Updates) -> tuple[list[Any], Any]:
  """Flattens gradients; ``None`` and IndexedSlices are one leaf each."""
  return jax.tree.flatten(
    updates,
    is_leaf=lambda x: x is None or indexed_slices.is_indexed_slices(x),
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
  return update_leaves.name_of(paths[index][0])


def read_rows(array: jax.Array, gradient: Any) -> jax.Array:
  """Reads the rows that a gradient touches; all rows if it is dense."""
  if not indexed_slices.is_indexed_slices(gradient):
    return array
  # Unused slots read the last row; their results are dropped.
  return jnp.asarray(array).at[gradient.indices].get(mode="clip")


def write_rows(array: jax.Array, gradient: Any, rows: jax.Array) -> jax.Array:
  """Replaces the rows that a gradient touches; all rows if it is dense."""
  if not indexed_slices.is_indexed_slices(gradient):
    return rows
  return jnp.asarray(array).at[gradient.indices].set(rows, mode="drop")


def decay_and_add(
  average: jax.Array,
  decay: hyperparameters.Scalar,
  gradient: indexed_slices.IndexedSlices,
  values: jax.Array,
) -> jax.Array:
  """Decays a whole moving average and adds rows to it.

  This is what TensorFlow does for a sparse gradient without a special kernel;
  the cost is that of the table.

  Args:
    average: The moving average, an array.
    decay: Its decay.
    gradient: Sparse gradient whose indices are the rows.
    values: The values to average, one row per row of the gradient; those of
      repeated indices add up.

  Returns:
    The new average.
  """
  return (
    (average * hyperparameters.cast(decay, average.dtype))
    .at[gradient.indices]
    .add(values * hyperparameters.complement(decay, values.dtype), mode="drop")
  )


def like_gradient(update: jax.Array, gradient: Any) -> Any:
  """Converts an update of the touched rows to the form of the gradient."""
  if not indexed_slices.is_indexed_slices(gradient):
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

  def update_fn(updates, state, params=None, **extra_args):
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
