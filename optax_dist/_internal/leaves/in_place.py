"""Changing a few large arrays from time to time, without copies in between."""

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
  """Returns ``fun(carry)`` where ``predicate`` holds, and ``carry`` elsewhere.

  The same as ``jax.lax.cond`` with the identity as its other branch, but a loop of
  one or no rounds: compilers keep what a loop carries in place, whereas what
  passes through a branch is copied, each time.

  Compilers compute what a loop does not change outside of it, in every step. What
  is expensive in ``fun``, such as a collective, must depend on a part of ``carry``
  that it changes.

  Args:
    predicate: a boolean scalar, equal on all replicas if ``fun`` communicates.
    fun: a function of ``carry`` whose result has its structure and shapes; dtypes
      are cast.
    carry: a pytree of arrays.
    names: the axes that the replicas lie along, bound here.

  Returns:
    The chosen one.

  Example:
    >>> double = lambda x: 2 * x
    >>> x = jnp.ones(2)
    >>> change_if(jnp.asarray(True), double, x, []).tolist()
    [2.0, 2.0]
  """
  times = predicate.astype(jnp.int32)
  # Under vmap, a predicate that has an axis of replicas would turn the loop into a
  # choice, with both sides computed in each step. The largest has no such axis.
  batched = tuple(name for name in names if name not in axes.mesh_axes())
  if batched:
    times = jax.lax.pmax(times, batched)
  carry = jax.tree.map(jnp.asarray, carry)
  # Where no types tell what varies, to ask for them is to trace all twice.
  tracked = any(axes.is_tracked(name) for name in axes.bound_axes())
  results = jax.eval_shape(fun, carry) if tracked else carry
  varying = jax.tree.map(
    lambda a, b: axes.varying_axes(a) | axes.varying_axes(b), carry, results
  )

  def cast(x, like, over):
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    return axes.cast_to_varying(x, over) if over else x

  carry = jax.tree.map(cast, carry, carry, varying)
  # What is differentiated has to be an argument of what has a rule for it.
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

  # A loop of an unknown number of rounds can't be differentiated in reverse; a
  # conditional can.
  @change.defjvp
  def _(primals, tangents):
    def choose(times, carry, *consts):
      return jax.lax.cond(
        times > 0, lambda: changed(carry, consts), lambda: carry
      )

    return jax.jvp(choose, primals, tangents)

  return change(times, carry, *consts)
