"""Helpers for the conversion of a leaf from floats to bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import checks


def rows_of(x: jax.Array, length: int) -> jax.Array:
  """Returns ``x`` of shape (n,) in rows of ``length``, padded with zeros."""
  return jnp.pad(x, (0, -x.size % length)).reshape(-1, length)


def within(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns finite numbers as the nearest that a dtype has, and others as they are.

  Args:
    x: floating-point numbers of any dtype, which the result has too.
    dtype: a floating-point dtype.
  """
  most = min(float(jnp.finfo(d).max) for d in (dtype, x.dtype))
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)


def mean_along(x: jax.Array, axis: int, count: int) -> jax.Array:
  """Returns a mean of numbers of which the sum may be too large for their dtype.

  Args:
    x: floating-point numbers.
    axis: the axis that is summed over.
    count: the number that the sum is divided by.
  """
  smaller, divisor = mean_factors(count)
  return jnp.sum(x * smaller, axis) / divisor


def mean_factors(count: int) -> tuple[float, float]:
  """Returns what to multiply each of ``count`` numbers by, and to divide their sum by.

  Both are exact, and no sum is larger than the largest of the numbers.
  """
  smaller = 2.0 ** -(count - 1).bit_length()
  return smaller, count * smaller


def by_scale(x: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns numbers divided by the scales of their blocks, and these to send.

  Args:
    x: array of shape (blocks, n).
    scales: array of shape (blocks, 1), not negative. A block with a scale of 0 is
      left as it is.

  Returns:
    The quotients; and the scales, NaN instead of infinite: a code times infinity
    would have any sign, or be NaN where it is 0.
  """
  # Compilers multiply by the reciprocal, and flush that of a larger number to 0.
  smaller = jnp.where(scales > 2.0**100, 2.0**-30, 1.0)
  safe = jnp.where(scales > 0, scales * smaller, 1.0)
  return x * smaller / safe, jnp.where(jnp.isfinite(scales), scales, jnp.nan)


def check_error_feedback(decay: float | None) -> None:
  """Checks the ``error_feedback`` argument of a method.

  Raises:
    ValueError: if it is neither None nor from 0 to 1.
  """
  if decay is not None:
    checks.fraction("error_feedback", decay, "None or a decay ")


def check_seed(seed: Any) -> int:
  """Returns the ``seed`` argument of a method, as an ``int``.

  Raises:
    ValueError: if it is not an integer from 0 to 2**63 - 1, which JAX can take.
  """
  return checks.count("seed", seed, least=0, most=2**63 - 1)
