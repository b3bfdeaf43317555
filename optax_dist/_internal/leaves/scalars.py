"""Decisions and counters, computed by a single kernel.

The CPU compiler makes each result a kernel, even a sum of two numbers:
compiling a dozen counters takes as long as the rest of a step. But it compiles
a loop over small values as one kernel, so this is a loop with a single
iteration.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist._internal import axes


def in_one_kernel(fun: Callable[..., Any], *args: Any) -> Any:
  """Returns ``fun(*args)``, computed once, and on CPU by a single kernel.

  Args:
    fun: a function of pytrees of scalars, or arrays of a few elements, that
      returns one. It can't be differentiated.
    *args: its arguments, booleans and integers; at least one is an int32 that
      is equal on all replicas.

  Example:
    >>> in_one_kernel(lambda n, yes: (n + 1, yes & (n > 2)), jnp.int32(2), True)
    (Array(3, dtype=int32), Array(False, dtype=bool))
  """
  args = jax.tree.map(jnp.asarray, args)
  if axes.platform() != "cpu" or not axes.is_fully_manual():
    return fun(*args)
  results = jax.tree.map(
    lambda x: axes.cast_to_varying(
      jnp.zeros(x.shape, x.dtype), tuple(axes.varying_axes(x))
    ),
    jax.eval_shape(fun, *args),
  )
  # Always 1, but the compiler must not know that, or it would remove the loop.
  given = [x for x in jax.tree.leaves(args) if x.dtype == jnp.int32]
  given.sort(key=lambda x: len(axes.varying_axes(x)))
  least = np.iinfo(np.int32).min
  some = jnp.ravel(given[0])[0]

  def compute(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    done, _ = carry
    # Values that a loop does not change are hoisted, so add 0.
    return done + 1, fun(*jax.tree.map(lambda x: _plus(x, done), args))

  zero = jnp.zeros([], jnp.int32)
  return jax.lax.while_loop(
    # Part of the condition, and so of that kernel.
    lambda carry: carry[0] < (some > least).astype(jnp.int32),
    compute,
    (zero, results),
  )[1]


def _plus(x: jax.Array, zero: jax.Array) -> jax.Array:
  return x ^ (zero > 0) if x.dtype == jnp.bool_ else x + zero.astype(x.dtype)
