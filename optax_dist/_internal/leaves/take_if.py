"""What replicas take from each other from time to time, where all leaves are small.

A loop or a conditional is slow to compile in the number of arrays that go through
it, and each step copies some of them. So only what was sent goes through a
conditional, in one buffer, and what follows from it is computed in each step and
chosen: where leaves are small that is no more work than the copies, and the
compiler joins it with what is computed for each leaf anyway.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves.keep_unless import keep_unless


def take_if(
  predicate: jax.Array,
  send: Callable[[], Any],
  take: Callable[[Any], Any],
  old: Any,
) -> Any:
  """Returns ``take(send())`` where ``predicate`` holds, and ``old`` elsewhere.

  Args:
    predicate: a boolean scalar, equal on all replicas if ``send`` communicates.
    send: a function of nothing that returns a pytree of arrays, preferably few. It
      is run where ``predicate`` holds only.
    take: a function of these. It is run in each step, and gets zeros where nothing
      was sent.
    old: a pytree of the structure and shapes that ``take`` returns; dtypes are
      cast to its own.

  Returns:
    The chosen one.

  Example:
    >>> x = jnp.ones(2)
    >>> take_if(jnp.asarray(True), lambda: 2 * x, lambda sent: x + sent, x).tolist()
    [3.0, 3.0]
  """
  nothing = jax.tree.map(axes.zeros, jax.eval_shape(send))
  sent = nothing
  if jax.tree.leaves(nothing):
    sent = axes.cond(predicate, send, lambda: nothing)
  old = jax.tree.map(jnp.asarray, old)
  step = lambda: ((), jax.tree.map(_cast, take(sent), old))
  return keep_unless(predicate, step, (), old)[1]


def _cast(x: Any, like: jax.Array) -> jax.Array:
  return x if x.dtype == like.dtype else x.astype(like.dtype)
