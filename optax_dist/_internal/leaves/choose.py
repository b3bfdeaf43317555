"""One of two trees, by a scalar: what is cheap where there are many leaves."""

from typing import Any

import jax
import jax.numpy as jnp


def choose(predicate: jax.Array, new: Any, old: Any) -> Any:
  """Returns ``new`` where a scalar predicate holds, and ``old`` elsewhere.

  The same as ``jnp.where`` for each array, in a program of a quarter of the size.

  Args:
    predicate: a boolean scalar.
    new: a pytree of arrays.
    old: a pytree of arrays of the same structure and dtypes.

  Returns:
    The chosen one.

  Example:
    >>> choose(jnp.asarray(True), [jnp.ones(2)], [jnp.zeros(2)])
    [Array([1., 1.], dtype=float32)]
  """

  def leaf(a, b):
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
      return jnp.where(predicate, a, b)
    return jax.lax.select(predicate, a, b)

  return jax.tree.map(leaf, new, old)
