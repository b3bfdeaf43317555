"""Checks whether arrays are finite, in one pass and with few kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_dist._internal import axes

# Bytes of an array, and elements of a row.
_LARGE = 64 << 10
_ROW = 8


def number(x: jax.Array) -> jax.Array:
  """Returns a float32 scalar: 0 if every element is finite, otherwise NaN.

  On CPU this is a sum, for which the compiler has a routine, whereas
  ``jnp.all`` compiles four kernels and needs an array of booleans in memory. For
  a large matrix it is a product with zeros, which takes two thirds of the time.

  Args:
    x: a floating-point or complex array.

  Example:
    >>> [number(jnp.array([x, 3e38])).item() for x in (3e38, jnp.inf)]
    [0.0, nan]
  """
  if axes.platform() == "cpu" and jnp.issubdtype(x.dtype, jnp.floating):
    nothing = _product(x) if _is_large_matrix(x) else x - x
    return jnp.sum(nothing).astype(jnp.float32)
  return jnp.where(jnp.all(jnp.isfinite(x)), 0.0, jnp.nan).astype(jnp.float32)


def _is_large_matrix(x: jax.Array) -> bool:
  # A narrower type would be cast first, short rows are as many results, and an
  # axis that the compiler may have sharded can't be multiplied with another.
  if x.dtype.itemsize < 4 or not axes.is_fully_manual():
    return False
  return x.ndim > 1 and x.shape[-1] >= _ROW and x.nbytes >= _LARGE


def _product(x: jax.Array) -> jax.Array:
  """Returns zeros, and NaN where a row is not finite."""
  zeros = jnp.zeros(x.shape[-1], x.dtype)
  return jnp.dot(x, zeros, precision=jax.lax.Precision.HIGHEST)


def are_all(numbers: Sequence[jax.Array]) -> jax.Array:
  """Returns whether all arrays are finite, from the :func:`number` of each."""
  return jnp.isfinite(add_up(numbers))


def add_up(numbers: Sequence[jax.Array]) -> jax.Array:
  """Returns a number that is finite if all arrays are."""
  return sum(numbers[1:], numbers[0])


def of_one_type(numbers: Sequence[jax.Array]) -> list[jax.Array]:
  """Casts numbers to vary over the same tracked axes, so that they add up."""
  over = axes.all_varying_axes(numbers)
  return [axes.cast_to_varying(x, over) for x in numbers]
