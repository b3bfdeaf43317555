"""A conditional exchange between replicas, for models whose leaves are all small.

Every array that passes a loop or a conditional adds to the compile time, and some
are copied in each step. So only the data that is sent passes the conditional, in one
buffer. What follows from it is computed in every step, and then selected: for small
leaves this costs no more than the copies, and the compiler fuses it with other
computations of the same leaf.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves.keep_unless import keep_unless
from optax_dist._internal.leaves.precision import cast_like


def take_if(
  predicate: jax.Array,
  send: Callable[[], Any],
  take: Callable[[Any], Any],
  old: Any,
) -> Any:
  """Returns ``take(send())`` where ``predicate`` holds, and ``old`` elsewhere.

  Args:
    predicate: a boolean scalar, equal on all replicas if ``send`` communicates.
    send: a function without arguments that returns a pytree of arrays, preferably
      few. It only runs if ``predicate`` holds.
    take: a function of these arrays. It runs in every step, on zeros if nothing was
      sent.
    old: a pytree of the structure and shapes that ``take`` returns; dtypes are
      cast to its own.

  Returns:
    The selected pytree.

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
  step = lambda: ((), jax.tree.map(cast_like, take(sent), old))
  return keep_unless(predicate, step, (), old)[1]
