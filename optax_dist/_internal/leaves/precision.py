"""The dtypes of sums, averages and centers.

Many small numbers are added to them, which would be lost to rounding in a
narrow dtype: a bfloat16 average with a decay of 0.999 stops when the steps are
smaller than its last bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_dtype(name: str, dtype: Any) -> None:
  """Checks a dtype given by the caller; None means the default.

  Raises:
    ValueError: if it is not a floating-point or complex dtype.
  """
  # NumPy would take the dtype of an array, which is more likely a mistake.
  fits = not isinstance(dtype, jax.Array | np.ndarray | np.generic)
  try:
    fits = fits and (
      dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    )
  except TypeError:
    fits = False
  if not fits:
    raise ValueError(
      f"`{name}` must be a floating-point dtype or None, got {dtype!r:.100}."
    )


def wide_dtype(like: Any, given: Any = None) -> jnp.dtype:
  """Returns the dtype of an accumulator.

  Args:
    like: an array of the values to accumulate.
    given: the dtype requested by the caller; None for that of ``like``, or
      float32 if that is narrower.

  Returns:
    A dtype; that of ``like`` if it is neither floating-point nor complex. It is
    complex if that of ``like`` is, whether ``given`` is or not.

  Example:
    >>> [str(wide_dtype(jnp.zeros(2, d))) for d in ("bfloat16", "float32", "int8")]
    ['float32', 'float32', 'int8']
  """
  dtype = jnp.result_type(like)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return dtype
  if given is None:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype("float32")
  given = jnp.dtype(given)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    is_double = jnp.finfo(given).bits > 32
    return jnp.dtype("complex128" if is_double else "complex64")
  return jnp.finfo(given).dtype


def for_sums(x: jax.Array) -> jax.Array:
  """Returns an array in a dtype in which many such arrays can be added up.

  That is the array's own dtype, or float32 if it has less than 16 bits: a sum of eight
  numbers is often too large for float8, or loses the smaller ones by rounding.

  Args:
    x: a floating-point or complex array.

  Example:
    >>> [str(for_sums(jnp.zeros(2, d)).dtype) for d in ("float8_e5m2", "bfloat16")]
    ['float32', 'bfloat16']
  """
  return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 16 else x


def scaled(x: jax.Array, factor: Any) -> jax.Array:
  """Multiplies an array by a real number and rounds once; see :func:`for_sums`.

  Args:
    x: a floating-point or complex array.
    factor: a number or a scalar array.

  Example:
    >>> scaled(jnp.asarray([1.5, 2.0], jnp.float8_e5m2), 0.75).tolist()
    [1.0, 1.5]
  """
  wide = for_sums(x)
  factor = jnp.asarray(factor, jnp.finfo(wide.dtype).dtype)
  return (wide * factor.astype(wide.dtype)).astype(x.dtype)


def widen(tree: Any, given: Any = None) -> Any:
  """Returns copies of a tree's arrays in their accumulators' dtypes."""
  return jax.tree.map(lambda x: jnp.array(x, wide_dtype(x, given)), tree)


def cast_like(x: Any, y: jax.Array) -> Any:
  """Casts ``x`` to the dtype of ``y``; a Python number adopts it anyway."""
  # NumPy's float64 is a float too, but doesn't.
  adopts = isinstance(x, int | float) and not isinstance(x, np.generic)
  return x if adopts else jnp.asarray(x, y.dtype)
