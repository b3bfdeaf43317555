"""Conditional accumulators of sparse gradients: sums and means of rows.

The counterpart of `optax_dist.tensorflow1.accumulator` for rows: pure functions
with static shapes that compute what TensorFlow's `SparseConditionalAccumulator`
computes, bit for bit. Rows are stored in a fixed number of slots, the capacity;
a gradient that does not fit is an error, or NaN under `jax.jit`, and never lost
silently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_dist.sparse.indexed_slices import IndexedSlices
from optax_dist.tensorflow1 import accumulator

# The number of rows of a table if it is not given: no index reaches it.
UNKNOWN_ROWS = 2**31 - 1


class SparseAccumulatorState(NamedTuple):
  """The accumulated rows of gradients.

  Attributes:
    step: The time step, an int32 scalar: older gradients are ignored.
    count: How many gradients are accumulated, an int32 scalar.
    rows: Sums of rows: values shaped `[capacity, *row]`, and their indices,
      int32 of shape `[capacity]`. Unused slots come last.
    row_counts: How many gradients had each row, int32 of shape `[capacity]`.
    size: How many slots are in use, an int32 scalar.
    overflowed: Whether a gradient did not fit, a boolean scalar. The results of
      `take` are then NaN; see `check_capacity`.
  """

  step: jax.Array
  count: jax.Array  # type: ignore[assignment]
  rows: IndexedSlices
  row_counts: jax.Array
  size: jax.Array
  overflowed: jax.Array


def init(
  capacity: int,
  row_shape: tuple[int, ...] = (),
  dtype: Any = jnp.float32,
  *,
  num_rows: int = UNKNOWN_ROWS,
  global_step: jax.typing.ArrayLike = 0,
) -> SparseAccumulatorState:
  """Creates an empty accumulator of rows.

  Args:
    capacity: How many rows it can hold at a time. The number of rows of the
      table is always enough if no gradient repeats an index; otherwise the
      total over the gradients of a step is.
    row_shape: The shape of a row.
    dtype: A floating dtype.
    num_rows: Rows of the table, which is also the index of unused slots.
    global_step: The time step to start from.

  Returns:
    The state.

  Raises:
    ValueError: If `capacity` is not positive.
    TypeError: If `dtype` is not floating: overflow could not be marked.

  Example:
    Row 1 is in two gradients, row 0 in one.

    >>> import jax.numpy as jnp
    >>> state = init(capacity=3, row_shape=(1,), num_rows=3)
    >>> first = IndexedSlices([[6.0], [3.0]], [0, 1], (3, 1))
    >>> state = apply(state, first, local_step=0)
    >>> second = IndexedSlices([[5.0]], [1], (3, 1))
    >>> state = apply(state, second, local_step=0)
    >>> state, mean, taken = take(state, num_required=2)
    >>> mean.indices.tolist(), mean.values[:, 0].tolist()
    ([0, 1, 3], [6.0, 4.0, 0.0])
  """
  if capacity < 1:
    raise ValueError(f"capacity must be a positive integer, got {capacity}.")
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"dtype must be a floating type, got {jnp.dtype(dtype)}.")
  return SparseAccumulatorState(
    accumulator.int32(global_step),
    accumulator.int32(0),
    IndexedSlices(
      jnp.zeros((capacity, *row_shape), dtype),
      jnp.full((capacity,), num_rows, jnp.int32),
      (num_rows, *row_shape),
    ),
    jnp.zeros((capacity,), jnp.int32),
    accumulator.int32(0),
    jnp.asarray(False),
  )


def apply(
  state: SparseAccumulatorState,
  slices: IndexedSlices,
  local_step: jax.typing.ArrayLike,
  max_staleness: int = 0,
) -> SparseAccumulatorState:
  """Adds the rows of a gradient if it is fresh, and otherwise ignores it.

  Rows are merged as in TensorFlow: it walks through both lists of indices at
  once, so lists that are sorted and without repeats give one sorted list, while
  others keep repeats that do not meet. To avoid this, sum repeats first
  (`indexed_slices.sum_duplicates`).

  Args:
    state: The accumulator.
    slices: The gradient; its unused slots may be anywhere.
    local_step: The step it was computed at, an integer scalar.
    max_staleness: Its largest staleness, in steps.

  Returns:
    The state. An empty gradient counts as one, but for no row. A gradient that
    does not fit is not added, and sets `overflowed`.

  Raises:
    ValueError: If the slices differ in shape or dtype from the accumulator's,
      or if they do not fit (only checked outside of `jax.jit`).
  """
  values, indices = slices.values, slices.indices.astype(jnp.int32)
  rows = state.rows
  if (slices.dense_shape, slices.dtype) != (rows.dense_shape, rows.dtype):
    raise ValueError(
      "slices must be of the accumulator's shape and type,"
      f" {rows.dense_shape} and {rows.dtype}, got {slices.dense_shape} and"
      f" {slices.dtype}."
    )
  fresh = accumulator.int32(local_step) >= state.step - max_staleness
  unused = indices >= slices.dense_shape[0]
  order = jnp.argsort(unused, stable=True)
  values, indices = values[order], indices[order]
  new_rows = jnp.sum(~unused, dtype=jnp.int32)
  old_rows = jnp.where(state.count > 0, state.size, 0)

  old, new, fits = _merge(
    rows.indices, old_rows, indices, new_rows, rows.indices.shape[0]
  )
  has_old, has_new = old >= 0, new >= 0
  size = jnp.sum(has_old | has_new, dtype=jnp.int32)

  def pick(array: Any, where: Any, at: Any) -> Any:
    # An empty gradient has no row to read.
    if not array.shape[0]:
      return jnp.zeros((at.shape[0], *array.shape[1:]), array.dtype)
    return jnp.where(_rows(where, array), array[jnp.maximum(at, 0)], 0)

  kept, added = pick(rows.values, has_old, old), pick(values, has_new, new)
  both = _rows(has_old & has_new, rows.values)
  merged = jnp.where(
    both,
    accumulator.rounded(added + kept),
    jnp.where(_rows(has_old, kept), kept, added),
  )
  old_index = pick(rows.indices, has_old, old)
  new_index = pick(indices, has_new, new)
  # Unused slots get the index one past the last row.
  index = jnp.where(
    has_old, old_index, jnp.where(has_new, new_index, slices.dense_shape[0])
  )
  row_counts = pick(state.row_counts, has_old, old)
  row_counts += accumulator.int32(has_new)
  into = SparseAccumulatorState(
    state.step,
    state.count + 1,
    IndexedSlices.unchecked(merged, index, rows.dense_shape),
    row_counts,
    size,
    state.overflowed,
  )
  state = jax.tree.map(lambda a, b: jnp.where(fresh & fits, a, b), into, state)
  state = state._replace(overflowed=state.overflowed | (fresh & ~fits))
  check_capacity(state)
  return state


def take(
  state: SparseAccumulatorState,
  num_required: jax.typing.ArrayLike = 1,
  reduction: str = "mean",
  *,
  divide_by: str = "rows",
) -> tuple[SparseAccumulatorState, IndexedSlices, jax.Array]:
  """Takes the mean of each accumulated row, if there are enough gradients.

  Args:
    state: The accumulator.
    num_required: How many gradients are required, an integer scalar.
    reduction: "mean" or "sum".
    divide_by: "rows" divides a row by the number of gradients that had it, as
      in TensorFlow; "gradients" divides all by the number of gradients.

  Returns:
    The state (emptied, one step further), the mean, and whether it was taken.
    If not, the state is unchanged and the mean has no rows in use. After an
    overflow the rows are NaN.

  Raises:
    ValueError: If `reduction` or `divide_by` is none of these.
  """
  accumulator.check_reduction(reduction)
  if divide_by not in ("rows", "gradients"):
    raise ValueError(
      f"divide_by must be 'rows' or 'gradients', got {divide_by!r}."
    )
  rows = state.rows
  num_rows = rows.dense_shape[0]
  taken = state.count >= jnp.maximum(accumulator.int32(num_required), 1)
  used = (jnp.arange(rows.indices.shape[0]) < state.size) & taken
  values = rows.values
  if reduction == "mean":
    counts = state.row_counts if divide_by == "rows" else state.count
    counts = jnp.broadcast_to(jnp.maximum(counts, 1), rows.indices.shape)
    values = accumulator.divided(values, _rows(counts, values))
  nan = jnp.full_like(values, jnp.nan)
  values = jnp.where(state.overflowed, nan, values)
  values = jnp.where(_rows(used, values), values, jnp.zeros_like(values))
  indices = jnp.where(used, rows.indices, num_rows)
  # Unchecked: TensorFlow accepts and returns negative indices.
  mean = IndexedSlices.unchecked(values, indices, rows.dense_shape)
  emptied = state._replace(
    step=state.step + taken.astype(jnp.int32),
    count=jnp.where(taken, 0, state.count),
    rows=IndexedSlices.unchecked(
      rows.values,
      jnp.where(taken, num_rows, rows.indices),
      rows.dense_shape,
    ),
    row_counts=jnp.where(taken, 0, state.row_counts),
    size=jnp.where(taken, 0, state.size),
    overflowed=state.overflowed & ~taken,
  )
  return emptied, mean, taken


def check_capacity(state: SparseAccumulatorState) -> None:
  """Raises an error if a gradient did not fit; does nothing under `jax.jit`.

  Args:
    state: A state, outside of `jax.jit`.

  Raises:
    ValueError: If the state has overflowed.
  """
  overflowed = state.overflowed
  if not isinstance(overflowed, jax.core.Tracer) and bool(jnp.any(overflowed)):
    raise ValueError(
      f"the rows of the gradients must fit capacity={state.row_counts.shape[-1]},"
      " but did not: make the accumulator with a larger capacity."
    )


def _merge(
  old: Any, old_rows: Any, new: Any, new_rows: Any, capacity: Any
) -> Any:
  """Walks through two lists of indices at once.

  Returns for each slot the positions in the old and in the new list that it
  comes from, -1 for neither, and whether both lists fit completely.
  """

  def walk(at: Any, _: Any) -> Any:
    i, j = at
    in_old, in_new = i < old_rows, j < new_rows
    a, b = old.at[i].get(mode="clip"), _get(new, j)
    from_old = in_old & (~in_new | (a <= b))
    from_new = in_new & (~in_old | (b <= a))
    slot = (jnp.where(from_old, i, -1), jnp.where(from_new, j, -1))
    return (
      i + accumulator.int32(from_old),
      j + accumulator.int32(from_new),
    ), slot

  start = (accumulator.int32(0), accumulator.int32(0))
  (i, j), (from_old, from_new) = lax.scan(walk, start, length=capacity)
  return from_old, from_new, (i >= old_rows) & (j >= new_rows)


def _get(array: Any, at: Any) -> Any:
  return (
    array.at[at].get(mode="clip") if array.shape[0] else accumulator.int32(0)
  )


def _rows(per_row: jax.Array, like: jax.Array) -> jax.Array:
  return per_row.reshape(per_row.shape + (1,) * (like.ndim - per_row.ndim))
