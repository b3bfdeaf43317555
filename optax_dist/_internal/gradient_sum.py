"""The gradients that a replica accumulates until the next aggregation.

Dense gradients are added in one array. Sparse ones (:class:`IndexedSlices`) are
added row by row in a fixed number of slots, together with the number of
gradients that touched each row: TensorFlow's sparse accumulators divide each
row by that number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, checks, collectives, indexed_slices
from optax_dist._internal.indexed_slices import IndexedSlices
from optax_dist._internal.leaves import precision

#: The index of unused slots: no row has it.
UNUSED = 2**31 - 1


class SparseSum(NamedTuple):
  """The sum of a replica's sparse gradients of one table.

  It consists of plain arrays, which every checkpoint library supports: one slot
  for each row that was touched, in ascending order, unused slots last.

  Attributes:
    values: array of shape ``[slots, *row]``.
    indices: int32 array of shape ``[slots]``: the rows; ``UNUSED`` in unused
      slots.
    touches: float32 array of shape ``[slots]``: for each slot, the number of
      gradients that touched the row.
  """

  values: jax.Array
  indices: jax.Array
  touches: jax.Array


def is_leaf(x: Any) -> bool:
  """Whether ``x`` is a gradient, a sum, or None for a missing one."""
  return x is None or isinstance(x, SparseSum | IndexedSlices)


def init(params: Any, sparse_capacity: Any = None, dtype: Any = None) -> Any:
  """Returns an empty sum.

  Args:
    params: a pytree of arrays.
    sparse_capacity: None, or a pytree like ``params`` (or a function of them
      that returns one) with None for a parameter with dense gradients and the
      number of slots for a table with sparse gradients.
    dtype: dtype of the sums, see :func:`precision.wide_dtype`.

  Returns:
    A pytree like ``params`` of zeros and :class:`SparseSum`.

  Raises:
    ValueError: if a capacity is not a positive integer, or is for a scalar.
  """
  if callable(sparse_capacity):
    sparse_capacity = sparse_capacity(params)

  def zeros(path, param, capacity=None):
    kind = precision.wide_dtype(param, dtype)
    if capacity is None:
      # Sharded like the parameter. A key has a dtype that can't be asked for.
      same = kind == jnp.result_type(param)
      return jnp.zeros_like(param, None if same else kind)
    slots = checks.integer(capacity)
    if slots is None or slots < 1 or not jnp.ndim(param):
      raise ValueError(
        "`sparse_capacity` must be None or a positive integer for each table, got"
        f" {capacity!r} for params{jax.tree_util.keystr(path)} of shape"
        f" {jnp.shape(param)}."
      )
    shape = jnp.shape(param)
    return SparseSum(
      jnp.zeros((slots, *shape[1:]), kind),
      jnp.full(slots, UNUSED, jnp.int32),
      jnp.zeros(slots, jnp.float32),
    )

  if sparse_capacity is None:
    return jax.tree_util.tree_map_with_path(zeros, params)
  treedef: Any = jax.tree.structure(params)
  with checks.structure("sparse_capacity", "the parameters"):
    treedef.flatten_up_to(sparse_capacity)
  return jax.tree_util.tree_map_with_path(zeros, params, sparse_capacity)


def check(gradient: Any, total: Any) -> None:
  """Checks that a gradient can be added to a sum.

  Raises:
    ValueError: if only one of a gradient and its sum is sparse, or if the
      gradient has more slots than its sum.
  """
  jax.tree_util.tree_map_with_path(
    _check_leaf, gradient, total, is_leaf=is_leaf
  )


def _check_leaf(path: Any, grad: Any, into: Any) -> None:
  name = "updates" + jax.tree_util.keystr(path)
  if grad is None:
    return
  if isinstance(grad, IndexedSlices) != isinstance(into, SparseSum):
    kind = "sparse" if isinstance(grad, IndexedSlices) else "dense"
    raise ValueError(
      f"{name} is {kind}, which `sparse_capacity` did not say: give the most"
      " rows that a replica holds until the next step for each parameter with"
      " a sparse gradient, and None for the others."
    )
  if isinstance(into, SparseSum):
    slots, capacity = grad.indices.shape[0], into.touches.shape[0]
    if slots > capacity:
      raise ValueError(
        f"{name} has {slots} slots, but `sparse_capacity` for it is {capacity}."
      )


def add(
  total: Any, gradient: Any, weight: Any = None, dtype: Any = None
) -> tuple[Any, Any]:
  """Adds one weighted gradient.

  Args:
    total: the result of :func:`init` or of this function; None for no sum, of
      which the gradient is the only one.
    gradient: a pytree like the parameters, with None for missing gradients.
    weight: a scalar, or None for 1.
    dtype: dtype of the result without a sum, see :func:`precision.wide_dtype`.

  Returns:
    The new sum, and a boolean scalar: whether every row found a slot, or True
    if there are no rows. If not, the new sum lacks rows and must not be used.
  """
  if total is None:
    return _cast(gradient, dtype), True
  fits: Any = True

  def add_leaf(grad, into):
    nonlocal fits
    if grad is None:
      return into
    if isinstance(into, SparseSum):
      into, leaf_fits = _add_slices(into, grad, weight)
      fits = leaf_fits if fits is True else fits & leaf_fits
      return into
    return into + _weighted(grad.astype(into.dtype), weight)

  total = jax.tree.map(add_leaf, gradient, total, is_leaf=is_leaf)
  return total, fits


def _weighted(x: jax.Array, weight: Any) -> jax.Array:
  return x if weight is None else x * jnp.asarray(weight, x.dtype)


def _add_slices(into, grad, weight) -> tuple[SparseSum, jax.Array]:
  capacity = into.touches.shape[0]
  grad = indexed_slices.map_values(lambda x: x.astype(into.values.dtype), grad)
  grad = indexed_slices.sum_duplicates(grad)
  used = grad.indices < grad.dense_shape[0]
  new = SparseSum(
    _weighted(grad.values, weight),
    jnp.where(used, grad.indices, UNUSED),
    used.astype(jnp.float32),
  )
  merged = merge(jax.tree.map(lambda *x: jnp.concatenate(x), into, new))
  # Unused slots come last, so it is enough to check the first slot after the capacity.
  fits = merged.indices[capacity] == UNUSED
  return jax.tree.map(lambda x: x[:capacity], merged), fits


def merge(total: SparseSum) -> SparseSum:
  """Sums the slots of equal rows; these come first, in ascending order."""

  def by_row(values):
    shape = (UNUSED, *values.shape[1:])
    return indexed_slices.sum_duplicates(
      IndexedSlices.unchecked(values, total.indices, shape)
    )

  slices = by_row(total.values)
  return SparseSum(slices.values, slices.indices, by_row(total.touches).values)


def empty(total: Any) -> Any:
  """Returns an empty sum like ``total``."""

  def empty_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, SparseSum):
      return jnp.zeros_like(leaf)
    zeros = jax.tree.map(jnp.zeros_like, leaf)
    return zeros._replace(indices=jnp.full_like(leaf.indices, UNUSED))

  return jax.tree.map(
    empty_leaf, total, is_leaf=lambda x: isinstance(x, SparseSum)
  )


def _cast(gradient: Any, dtype: Any) -> Any:
  """Casts dense gradients to the dtypes in which they are summed."""

  def cast_leaf(grad: Any) -> Any:
    if grad is None or isinstance(grad, IndexedSlices):
      return grad
    return jnp.asarray(grad, precision.wide_dtype(grad, dtype))

  return jax.tree.map(cast_leaf, gradient, is_leaf=is_leaf)


def reduce(
  total: Any,
  count: jax.Array | None,
  like: Any,
  names: tuple[axes.AxisName, ...],
) -> tuple[Any, Any]:
  """Sums the sums of all replicas, and how many gradients are in them.

  Args:
    total: this replica's sum.
    count: the number of gradients in it, sent along as a float32 number; None
      not to send it.
    like: the gradient, for its structure.
    names: the bound axes over the replicas.

  Returns:
    The total, with the structure of ``like``, and the count or None.
  """
  treedef: Any
  grads, treedef = jax.tree.flatten(like, is_leaf=is_leaf)
  results = treedef.flatten_up_to(total)
  dense = [
    i
    for i, grad in enumerate(grads)
    if not (grad is None or isinstance(grad, IndexedSlices))
  ]
  sent = [results[i] for i in dense]
  if count is not None:
    sent.append(axes.cast_to_varying(count.astype(jnp.float32), names))
  sums = collectives.sum_leaves(sent, [names] * len(sent))
  if count is not None:
    count = sums.pop().astype(jnp.int32)
  for i, x in zip(dense, sums, strict=True):
    results[i] = x
  gather = lambda x: collectives.gather_rows(x, names)
  for i, grad in enumerate(grads):
    if isinstance(grad, IndexedSlices):
      results[i] = merge(jax.tree.map(gather, results[i]))
  return treedef.unflatten(results), count


def divide(
  total: Any, like: Any, all_in: Any, sparse_average: str = "touched"
) -> Any:
  """Returns the average of all gradients.

  Args:
    total: their sum, from :func:`reduce`.
    like: the gradient, for its structure and dtypes.
    all_in: the number of gradients; if it is 0, the average is zero.
    sparse_average: ``"touched"`` divides each row of a sparse gradient by the
      number of gradients that touched it, ``"gradients"`` by the number of
      gradients.
  """
  divisor = jnp.maximum(all_in, 1)

  def divide_leaf(grad, x):
    if grad is None:
      return None
    if isinstance(grad, IndexedSlices):
      by = None if sparse_average == "touched" else divisor
      return _divide_slices(x, grad.dense_shape, by)
    kind = jnp.finfo(x.dtype).dtype
    wide = x.dtype
    if kind.itemsize < 4:
      kind = wide = jnp.dtype(jnp.float32)
    mean = x.astype(wide) * (1 / divisor.astype(kind)).astype(wide)
    return mean.astype(grad.dtype)

  return jax.tree.map(divide_leaf, like, total, is_leaf=is_leaf)


def _divide_slices(merged: SparseSum, shape, divisor) -> IndexedSlices:
  values = merged.values
  by = jnp.maximum(merged.touches, 1) if divisor is None else divisor
  by = jnp.broadcast_to(by, merged.touches.shape).astype(values.dtype)
  by = by.reshape(by.shape + (1,) * (values.ndim - 1))
  return IndexedSlices.unchecked(
    values / by, jnp.minimum(merged.indices, shape[0]), shape
  )
