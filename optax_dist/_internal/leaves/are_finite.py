"""Whether arrays are finite, in one pass over them, and no kernel to compile."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_dist._internal import axes

# Elements are made so much smaller that finite ones of 2**31 can't add up to infinity.
_SMALL = 2.0**-32


def number(x: jax.Array) -> jax.Array:
  """Returns a float32 scalar that is finite where every element is.

  On CPU it is a sum, which the compiler has a routine for, whereas ``jnp.all`` is
  four kernels to compile and an array of booleans in memory.

  Args:
    x: a floating-point or complex array.

  Example:
    >>> [bool(jnp.isfinite(number(jnp.array([x, 3e38])))) for x in (3e38, jnp.inf)]
    [True, False]
  """
  manual = axes.platform() == "cpu" and axes.is_fully_manual()
  if manual and x.dtype == jnp.float32:
    flat = jnp.ravel(x)
    small = jnp.full(flat.shape, _SMALL, x.dtype)
    return jnp.dot(flat, small, precision=jax.lax.Precision.HIGHEST)
  return jnp.where(jnp.all(jnp.isfinite(x)), 0.0, jnp.nan).astype(jnp.float32)


def are_all(numbers: Sequence[jax.Array]) -> jax.Array:
  """Returns whether all arrays are finite, from the :func:`number` of each."""
  return jnp.isfinite(sum(numbers[1:], numbers[0]))
