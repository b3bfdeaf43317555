"""Sparse gradients of embedding tables, as in TensorFlow.

An :class:`IndexedSlices` represents a dense array that is zero except for some
rows: row ``indices[i]`` gets ``values[i]``, and repeated indices add up. It is
a pytree of two arrays, so it passes through ``jax.jit``, ``jax.vmap`` and
``shard_map``, but to an optimizer it is *one* gradient: every ``jax.tree.map``
over gradients that may contain one needs ``is_leaf=is_indexed_slices``.

A ``jax.tree.map`` without it, as in most of optax, would scale and clip the
indices too. So the leaf that holds them has its own dtype, which JAX can move
and select but refuses to compute with: the error from ``optax.scale(2)`` names
the remedy, :func:`optax_dist.sparse.row_wise`. It is one of JAX's extended
dtypes, like those that prevent arithmetic on random keys. ``slices.indices``
are the integers.

Sizes stay static under ``jit``: an unused slot has the index
``dense_shape[0]``, one past the last row, and zero values. Reads of such a slot
are never used, and writes to it are dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import random as extended_random
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist._internal import checks


def _no_random_bits(*args: Any, **kwargs: Any) -> NoReturn:
  raise TypeError("the row indices of IndexedSlices are not random keys")


# JAX's only public way to create an extended dtype. Its name is part of every
# error that JAX raises when it is used in a computation.
_INDEX_DTYPE = extended_random.define_prng_impl(
  key_shape=(1,),
  seed=_no_random_bits,
  split=_no_random_bits,
  random_bits=_no_random_bits,
  fold_in=_no_random_bits,
  name="optax_dist_row_indices",
  tag="row indices: use optax_dist.sparse.row_wise(tx)",
)


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices:
  """Rows of an array, and their indices.

  It has two arrays, and the static shape of the dense array (part of the tree
  structure). Row ``i`` of ``values`` belongs to row ``indices[i]``; repeated
  indices represent the sum of their values. Indices count from the front: a
  negative one raises an error if its value is known, and is otherwise
  undefined. Slots with the index ``dense_shape[0]`` are unused.

  Attributes:
    values: Array of shape ``[n, *dense_shape[1:]]``.
    dense_shape: Shape of the array that the rows belong to.

  Source: ``tf.IndexedSlices``.

  Example:
    >>> import jax.numpy as jnp
    >>> slices = IndexedSlices(jnp.ones((2, 3)), jnp.array([4, 0]), (5, 3))
    >>> slices.to_dense()[:, 0].tolist()
    [1.0, 0.0, 0.0, 0.0, 1.0]

    Stock optax would scale the indices too, and raises an error:

    >>> optax.scale(2).update(  # doctest: +ELLIPSIS
    ...   slices, optax.EmptyState()
    ... )
    Traceback (most recent call last):
    TypeError: ...key<row indices: use optax_dist.sparse.row_wise(tx)>...
  """

  values: jax.Array
  dense_shape: tuple[int, ...]
  # The indices as an opaque leaf, or what JAX puts in its place.
  _rows: Any

  # Without this, NumPy would add the slices to each element of an array, instead of
  # calling `__radd__`.
  __array_ufunc__ = None

  def __init__(
    self,
    values: jax.typing.ArrayLike,
    indices: jax.typing.ArrayLike,
    dense_shape: tuple[int, ...],
  ):
    """Checks the shapes and creates the slices.

    Args:
      values: Array of shape ``[n, *dense_shape[1:]]``.
      indices: Integer array of shape ``[n]``; kept as int32.
      dense_shape: Shape of the array that the rows belong to.

    Raises:
      TypeError: If ``indices`` are not integers.
      ValueError: If the shapes do not fit, if there are more than 2**31 - 1
        rows, or if an index is negative or greater than ``dense_shape[0]``
        (only checked outside of ``jax.jit``).
    """
    values, known = _array("values", values), _array("indices", indices)
    self.dense_shape = _checked_shape(dense_shape)
    if not jnp.issubdtype(known.dtype, jnp.integer):
      raise TypeError(f"indices must be integers, got {known.dtype}")
    values, indices = jnp.asarray(values), jnp.asarray(known)
    expected = (*indices.shape, *self.dense_shape[1:])
    if indices.ndim != 1 or values.shape != expected:
      raise ValueError(
        "values must have the shape [n, *dense_shape[1:]] and indices [n], got"
        f" values {values.shape}, indices {indices.shape} and"
        f" dense_shape {self.dense_shape}"
      )
    if indices.size and not isinstance(indices, jax.core.Tracer):
      with jax.ensure_compile_time_eval():
        low, high = int(known.min()), int(known.max())
      if low < 0 or high > self.dense_shape[0]:
        raise ValueError(
          f"indices must lie in [0, {self.dense_shape[0]}] (the last one marks"
          f" unused slots), got values from {low} to {high}"
        )
    self.values, self._rows = values, _guarded(indices)

  @classmethod
  def unchecked(
    cls, values: Any, indices: Any, dense_shape: Sequence[int]
  ) -> "IndexedSlices":
    """Creates slices that are known to be valid, or hold stacked arrays.

    Args:
      values: Array of shape ``[..., n, *dense_shape[1:]]``.
      indices: Integer array of shape ``[..., n]``.
      dense_shape: Shape of the array that the rows belong to.

    Returns:
      The slices. Nothing is checked, so nothing waits for the arrays.
    """
    rows = _guarded(jnp.asarray(indices))
    return cls.tree_unflatten(tuple(dense_shape), (values, rows))

  def tree_flatten_with_keys(
    self,
  ) -> tuple[tuple[tuple[Any, Any], ...], tuple[int, ...]]:
    """Returns the two arrays with their names, and the static shape."""
    key = jax.tree_util.GetAttrKey
    children = ((key("values"), self.values), (key("indices"), self._rows))
    return children, self.dense_shape

  @classmethod
  def tree_unflatten(
    cls, dense_shape: tuple[int, ...], children: Iterable[Any]
  ) -> "IndexedSlices":
    """Creates slices of whatever JAX puts in, unchecked."""
    slices = object.__new__(cls)
    slices.values, slices._rows = children
    slices.dense_shape = dense_shape
    return slices

  @property
  def indices(self) -> jax.Array:
    """The rows: int32 array of shape ``[n]``.

    If JAX has put something else in place of the leaf (an axis, a sharding),
    that is returned.
    """
    dtype = getattr(self._rows, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
      return self._rows
    if isinstance(self._rows, jax.ShapeDtypeStruct):
      abstract: Any = jax.ShapeDtypeStruct(self._rows.shape, jnp.int32)
      return abstract
    data = jax.random.key_data(self._rows)[..., 0]
    return jax.lax.bitcast_convert_type(data, jnp.int32)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense array."""
    return self.dense_shape

  @property
  def dtype(self) -> np.dtype:
    """Type of the values."""
    return self.values.dtype

  @property
  def valid(self) -> jax.Array:
    """Which slots are in use: booleans that broadcast against ``values``."""
    used = self.indices < self.dense_shape[0]
    return used.reshape(used.shape + (1,) * (self.values.ndim - 1))

  def __repr__(self) -> str:
    return (
      f"IndexedSlices(values={self.values!r}, indices={self.indices!r},"
      f" dense_shape={self.dense_shape})"
    )

  def to_dense(self) -> jax.Array:
    """Builds the array, of shape ``dense_shape``; repeated indices add up."""
    zeros = jnp.zeros(self.dense_shape, self.values.dtype)
    to = _by_columns(self.values) or _sharding(zeros, self.indices)
    return zeros.at[self.indices].add(self.values, mode="drop", out_sharding=to)

  def __add__(self, dense: jax.typing.ArrayLike) -> jax.Array:
    """Adds the rows to an array of shape ``dense_shape``, in its dtype.

    So ``optax.apply_updates``, which adds, takes sparse updates too.
    """
    if is_indexed_slices(dense):
      return NotImplemented
    dense = jnp.asarray(dense)
    if dense.shape != self.dense_shape:
      raise ValueError(
        f"a sparse update for an array of shape {self.dense_shape} met a"
        f" parameter of shape {dense.shape}"
      )
    values = self.values.astype(dense.dtype)
    return dense.at[self.indices].add(
      values,
      mode="drop",
      out_sharding=_sharding(dense, values, self.indices),
    )

  __radd__ = __add__


def is_indexed_slices(x: Any) -> bool:
  """Returns whether ``x`` is an :class:`IndexedSlices`; for ``is_leaf=``."""
  return isinstance(x, IndexedSlices)


def has_slices(tree: Any) -> bool:
  """Returns whether any leaf of a tree is an :class:`IndexedSlices`."""
  leaves = jax.tree.leaves(tree, is_leaf=is_indexed_slices)
  return any(map(is_indexed_slices, leaves))


def values_of(x: Any) -> Any:
  """Returns the values of :class:`IndexedSlices`; anything else unchanged."""
  return x.values if is_indexed_slices(x) else x


def map_values(fun: Callable[[Any], Any], tree: Any) -> Any:
  """Maps a function over gradients, and over the values of sparse ones.

  Args:
    fun: Takes an array and returns an array of the same shape. For sparse leaves
      it gets the values.
    tree: Tree of arrays, :class:`IndexedSlices` and ``None``.

  Returns:
    A tree like ``tree``. ``None`` stays ``None``.

  Example:
    >>> import jax.numpy as jnp
    >>> slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (5, 2))
    >>> map_values(lambda x: 2 * x, {"table": slices})["table"].values.tolist()
    [[2.0, 2.0]]
  """

  def on_leaf(leaf: Any) -> Any:
    if not is_indexed_slices(leaf):
      return fun(leaf)
    arrays = fun(leaf.values), leaf._rows
    return IndexedSlices.tree_unflatten(leaf.dense_shape, arrays)

  return jax.tree.map(on_leaf, tree, is_leaf=is_indexed_slices)


def as_dense(tree: Any) -> Any:
  """Returns a tree whose sparse leaves are arrays."""
  return jax.tree.map(
    lambda x: x.to_dense() if is_indexed_slices(x) else x,
    tree,
    is_leaf=is_indexed_slices,
  )


def sum_duplicates(slices: IndexedSlices) -> IndexedSlices:
  """Adds up the values of repeated indices.

  The cost is that of sorting the indices; the number of slots is unchanged, so
  this runs under ``jax.jit``. Values of one index are added in order of
  appearance.

  Args:
    slices: Slices whose indices may repeat.

  Returns:
    Slices for the same array: ascending indices, each row once, then the unused
    slots.

  Example:
    >>> import jax.numpy as jnp
    >>> slices = IndexedSlices(jnp.array([1., 2., 3.]), jnp.array([7, 0, 7]), (9,))
    >>> summed = sum_duplicates(slices)
    >>> summed.indices.tolist(), summed.values.tolist()
    ([0, 7, 9], [2.0, 4.0, 0.0])
  """
  slots, rows = slices.indices.shape[0], slices.dense_shape[0]
  if not slots:
    return slices
  gathered = _gathered(slices.indices)
  order = jnp.argsort(gathered, stable=True)
  indices = gathered[order]
  first = jnp.concatenate([jnp.ones(1, bool), indices[1:] != indices[:-1]])
  slot = jnp.cumsum(first, dtype=jnp.int32) - 1
  values = _gathered(jnp.where(slices.valid, slices.values, 0))[order]
  # Not `jax.ops.segment_sum`, which has no argument for the sharding of its result.
  values = (
    jnp.zeros_like(values)
    .at[slot]
    .add(
      values,
      indices_are_sorted=True,
      mode="drop",
      out_sharding=_sharding(values),
    )
  )
  unique = jnp.full(slots, rows, slices.indices.dtype).at[slot].set(indices)
  return IndexedSlices.unchecked(values, unique, slices.dense_shape)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
  """Adds updates to parameters; a sparse update changes only its rows.

  Like ``optax.apply_updates``, and identical for dense updates. The cost of a
  sparse update is proportional to its rows if the parameter's buffer may be
  overwritten: donate the parameters to the jitted step (``donate_argnums``),
  otherwise XLA copies the table first.

  Args:
    params: Tree of arrays.
    updates: Tree like ``params`` of arrays, :class:`IndexedSlices` or ``None``
      (which leaves the parameter unchanged).

  Returns:
    Parameters of the same shapes and dtypes.

  Raises:
    ValueError: If a sparse update belongs to an array of another shape.

  Example:
    >>> import jax.numpy as jnp
    >>> update = IndexedSlices(jnp.ones((1, 2)), jnp.array([2]), (3, 2))
    >>> apply_updates(jnp.zeros((3, 2)), update).tolist()
    [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
  """

  def on_leaf(param: Any, update: Any) -> Any:
    if param is None or update is None:
      return param
    return optax.apply_updates(param, update)

  return jax.tree.map(on_leaf, params, updates, is_leaf=lambda x: x is None)


def lookup_value_and_grad(
  fun: Callable[..., Any], has_aux: bool = False
) -> Callable[..., Any]:
  """Differentiates through embedding lookups without a dense gradient.

  The lookups happen outside of ``fun``, which sees the looked-up rows in place
  of each table, so the gradient is taken with respect to the rows.

  Args:
    fun: Takes parameters whose tables are replaced by looked-up rows (of shape
      ``[*indices.shape, *table.shape[1:]]``) and further arguments, and returns
      a scalar, or a scalar and auxiliary data.
    has_aux: Whether ``fun`` returns auxiliary data too.

  Returns:
    A function of ``(params, lookups, *args, **kwargs)``. ``lookups`` is a tree
    like ``params`` with an integer array where a table is looked up and
    ``None`` elsewhere. It returns what ``fun`` returned and the gradients: a
    tree like ``params`` with :class:`IndexedSlices` for the tables, one slot
    for each lookup (an index that repeats has several). Rows outside of the
    table read as zero and get no gradient.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"table": jnp.ones((9, 2)), "w": jnp.array([1.0, 2.0])}
    >>> def loss(p, target):
    ...   return jnp.sum((p["table"] @ p["w"] - target) ** 2)
    >>> lookups = {"table": jnp.array([3, 3]), "w": None}
    >>> value, grads = lookup_value_and_grad(loss)(params, lookups, 2.0)
    >>> float(value), grads["table"].values.tolist(), grads["w"].tolist()
    (2.0, [[2.0, 4.0], [2.0, 4.0]], [4.0, 4.0])
  """
  checks.function("fun", fun)
  checks.flag("has_aux", has_aux)
  value_and_grad = jax.value_and_grad(fun, has_aux=has_aux)

  def read(param: Any, ids: Any) -> Any:
    if ids is None:
      return param
    slots = _as_slots(ids, param)
    to = _by_columns(param) or _sharding(slots)
    if to is not None:
      of_slots, of_rows = (jax.typeof(x).sharding.spec for x in (slots, param))
      to = to.update(spec=PartitionSpec(*of_slots, *of_rows[1:]))
    return param.at[slots].get(mode="fill", fill_value=0, out_sharding=to)

  def as_slices(param: Any, ids: Any, grad: Any) -> Any:
    if ids is None:
      return grad
    values = grad.reshape(-1, *param.shape[1:])
    return IndexedSlices.unchecked(
      values, _as_slots(ids, param).ravel(), param.shape
    )

  def wrapped(
    params: Any, lookups: Any, *args: Any, **kwargs: Any
  ) -> tuple[Any, Any]:
    rows = jax.tree.map(read, params, lookups)
    value, grads = value_and_grad(rows, *args, **kwargs)
    return value, jax.tree.map(as_slices, params, lookups, grads)

  return wrapped


def _sharding(x: jax.Array, *others: jax.Array) -> NamedSharding | None:
  """Returns the sharding of ``x`` if it, or another, is sharded over Explicit axes.

  Over Explicit axes, JAX requires the sharding of an indexing's result.
  """
  for y in (x, *others):
    mesh = jax.typeof(y).sharding.mesh
    if any(jax.typeof(y).sharding.spec):
      return NamedSharding(mesh, jax.typeof(x).sharding.spec)
  return None


def _by_columns(x: jax.Array) -> NamedSharding | None:
  """Returns the sharding of rows of ``x``, whose first axis is in one piece."""
  sharding = _sharding(x)
  if sharding is None:
    return None
  return sharding.update(spec=PartitionSpec(None, *sharding.spec[1:]))


def _gathered(x: jax.Array) -> jax.Array:
  """Returns ``x`` with its first axis, if sharded over Explicit axes, in one piece."""
  sharding = _sharding(x)
  if sharding is None or sharding.spec[0] is None:
    return x
  return jax.sharding.reshard(x, _by_columns(x))


def _array(name: str, value: Any) -> Any:
  """Returns an array; NumPy's stays one, since JAX takes 32 bits of its int64."""
  if isinstance(value, jax.Array | np.ndarray):
    return value
  try:
    return np.asarray(value) if name == "indices" else jnp.asarray(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise TypeError(f"{name} must be an array, got {value!r:.100}") from error


def _checked_shape(dense_shape: Any) -> tuple[int, ...]:
  sizes = dense_shape if isinstance(dense_shape, list | tuple) else ()
  shape = tuple(-1 if (n := checks.integer(x)) is None else n for x in sizes)
  if not shape or min(shape) < 0:
    raise ValueError(
      "dense_shape must be a tuple of integers, not negative, with the rows first,"
      f" got {dense_shape!r:.100}"
    )
  if shape[0] > checks.MOST_COUNT:
    raise ValueError(
      f"dense_shape[0] must be at most {checks.MOST_COUNT}, the largest int32"
      f" index, got {shape[0]}"
    )
  return shape


def _guarded(indices: jax.Array) -> jax.Array:
  """Gives indices the dtype that refuses arithmetic."""
  bits = jax.lax.bitcast_convert_type(indices.astype(jnp.int32), jnp.uint32)
  return jax.random.wrap_key_data(bits[..., None], impl=_INDEX_DTYPE)


def _as_slots(ids: Any, table: jax.Array) -> jax.Array:
  """Maps indices outside of the table to the index of unused slots."""
  ids, rows = _array("indices", ids), table.shape[0]
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(f"lookups must be integers, got {ids.dtype}")
  where = np.where if isinstance(ids, np.ndarray) else jnp.where
  return jnp.asarray(where((ids >= 0) & (ids < rows), ids, rows))
