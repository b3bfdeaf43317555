"""Changes a few large arrays occasionally, without copies in between."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp

from optax_dist._internal import axes

Carry = TypeVar("Carry")


def change_if(
  predicate: jax.Array,
  fun: Callable[[Carry], Carry],
  carry: Carry,
  names: Iterable[axes.AxisName],
) -> Carry:
  """Returns ``fun(carry)`` if ``predicate`` is true, otherwise ``carry``.

  The same as ``jax.lax.cond`` with the identity as its other branch, but as a
  loop of one or zero iterations: compilers keep a loop's carry in place,
  whereas a value passed through a branch is copied each time.

  Compilers hoist values that a loop does not change, and compute them in every
  step. Expensive operations in ``fun``, such as collectives, must depend on a
  part of ``carry`` that it changes.

  Args:
    predicate: a boolean scalar, equal on all replicas if ``fun`` communicates.
    fun: a function of ``carry`` whose result has its structure and shapes;
      dtypes are cast.
    carry: a pytree of arrays.
    names: the bound axes over the replicas.

  Returns:
    The chosen value.

  Example:
    >>> double = lambda x: 2 * x
    >>> x = jnp.ones(2)
    >>> change_if(jnp.asarray(True), double, x, []).tolist()
    [2.0, 2.0]
  """
  times = predicate.astype(jnp.int32)
  # Under vmap, a predicate with a replica axis would turn the loop into a
  # select, with both sides computed in each step. The maximum has no such axis.
  batched = tuple(name for name in names if name not in axes.mesh_axes())
  if batched:
    times = jax.lax.pmax(times, batched)
  carry = jax.tree.map(jnp.asarray, carry)
  # Without tracked axes, asking for the types would only trace everything
  # twice.
  tracked = any(axes.is_tracked(name) for name in axes.bound_axes())
  results = jax.eval_shape(fun, carry) if tracked else carry
  varying = jax.tree.map(
    lambda a, b: axes.varying_axes(a) | axes.varying_axes(b), carry, results
  )

  def cast(x, like, over):
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    return axes.cast_to_varying(x, over) if over else x

  carry = jax.tree.map(cast, carry, carry, varying)
  # Differentiated values must be arguments of the function with the custom
  # rule.
  closed, consts = jax.closure_convert(fun, carry)

  def changed(carry, consts):
    return jax.tree.map(cast, closed(carry, *consts), carry, varying)

  @jax.custom_jvp
  def change(times, carry, *consts):
    _, carry = jax.lax.while_loop(
      lambda count_and_carry: count_and_carry[0] < times,
      lambda count_and_carry: (
        count_and_carry[0] + 1,
        changed(count_and_carry[1], consts),
      ),
      (jnp.zeros_like(times), carry),
    )
    return carry

  # A loop with an unknown number of iterations can't be differentiated in
  # reverse; a conditional can.
  @change.defjvp
  def _(primals, tangents):
    def choose(times, carry, *consts):
      return jax.lax.cond(
        times > 0, lambda: changed(carry, consts), lambda: carry
      )

    return jax.jvp(choose, primals, tangents)

  return change(times, carry, *consts)
