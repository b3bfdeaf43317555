"""Conditional accumulators: sums of fresh gradients, and their mean.

Pure functions on states of arrays, with static shapes, so they run under
`jax.jit`. They compute what TensorFlow's `ConditionalAccumulator` computes, bit
for bit: gradients are added one by one, in order of arrival and in their own
dtype, and the mean is one division by the count in that dtype. Blocking, and
the order in which takes are served, are handled by `optax_dist.quorum`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

REDUCTIONS = ("mean", "sum")


class AccumulatorState(NamedTuple):
  """The accumulated gradients.

  Attributes:
    step: The time step, an int32 scalar: older gradients are ignored. It is the
      number of takes, unless it was set.
    count: How many gradients are accumulated, an int32 scalar.
    total: Their sum, with the shapes and dtypes of the gradients; meaningless
      while `count` is 0.
  """

  step: jax.Array
  count: jax.Array  # type: ignore[assignment]
  total: optax.Updates


def init(
  gradients: optax.Updates, global_step: jax.typing.ArrayLike = 0
) -> AccumulatorState:
  """Creates an empty accumulator.

  Args:
    gradients: A tree of arrays, or of `jax.ShapeDtypeStruct`, with the shapes
      and dtypes of the gradients.
    global_step: The time step to start from.

  Returns:
    The state.

  Example:
    >>> import jax.numpy as jnp
    >>> state = init(jnp.zeros(2))
    >>> state = apply(state, jnp.array([1.0, 2.0]), local_step=0)
    >>> state = apply(state, jnp.array([3.0, 4.0]), local_step=0)
    >>> state, mean, taken = take(state, num_required=2)
    >>> state = apply(state, jnp.array([5.0, 6.0]), local_step=0)
    >>> mean.tolist(), bool(taken), int(state.step), int(state.count)
    ([2.0, 3.0], True, 1, 0)
  """
  total = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), gradients)
  return AccumulatorState(int32(global_step), int32(0), total)


def apply(
  state: AccumulatorState,
  gradients: optax.Updates,
  local_step: jax.typing.ArrayLike,
  max_staleness: int = 0,
) -> AccumulatorState:
  """Adds gradients if they are fresh, and otherwise ignores them, as a whole.

  Args:
    state: The accumulator.
    gradients: A tree of arrays like the one it was created for.
    local_step: The step they were computed at, an integer scalar.
    max_staleness: Largest staleness, in steps.

  Returns:
    The state; unchanged if `local_step < step - max_staleness`.

  Raises:
    ValueError: If shapes or dtypes differ from the accumulator's.
  """
  _check_like(state.total, gradients)
  fresh = int32(local_step) >= state.step - max_staleness
  first = state.count == 0

  def add(total: Any, gradient: Any) -> Any:
    # The first one is copied: 0 + -0. would lose the sign of zero.
    total = jnp.where(first, gradient, rounded(total + gradient))
    return total

  total = jax.tree.map(add, state.total, gradients)
  total = jax.tree.map(
    lambda new, old: jnp.where(fresh, new, old), total, state.total
  )
  return AccumulatorState(
    state.step, state.count + fresh.astype(jnp.int32), total
  )


def take(
  state: AccumulatorState,
  num_required: jax.typing.ArrayLike = 1,
  reduction: str = "mean",
) -> tuple[AccumulatorState, optax.Updates, jax.Array]:
  """Takes the mean of the accumulated gradients, if there are enough.

  Args:
    state: The accumulator.
    num_required: How many gradients are required, an integer scalar.
    reduction: "mean" or "sum".

  Returns:
    The state (emptied, one step further), the mean, and whether it was taken.
    If not, the state is unchanged and the mean is all zeros.

  Raises:
    ValueError: If `reduction` is neither of these.
  """
  check_reduction(reduction)
  taken = state.count >= jnp.maximum(int32(num_required), 1)

  def reduced(total: Any) -> Any:
    if reduction == "mean":
      total = divided(total, state.count)
    return jnp.where(taken, total, jnp.zeros_like(total))

  mean = jax.tree.map(reduced, state.total)
  return (
    AccumulatorState(
      state.step + taken.astype(jnp.int32),
      jnp.where(taken, 0, state.count),
      state.total,
    ),
    mean,
    taken,
  )


def set_global_step(state: Any, step: jax.typing.ArrayLike) -> Any:
  """Sets the time step, also backwards; accumulated gradients are kept.

  Args:
    state: An `AccumulatorState`, or another state with a `step`.
    step: The step, an integer scalar.

  Returns:
    The state.

  Example:
    >>> import jax.numpy as jnp
    >>> state = set_global_step(init(jnp.zeros(1)), 7)
    >>> int(apply(state, jnp.ones(1), local_step=6).count)
    0
  """
  return state._replace(step=int32(step))


def int32(value: jax.typing.ArrayLike) -> jax.Array:
  """Converts the value to an int32 array."""
  return jnp.asarray(value).astype(jnp.int32)


def rounded(x: jax.Array) -> jax.Array:
  """Rounds to the dtype of `x`: compilers may keep halves in float32."""
  if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)
  return x


def _check_like(total: optax.Updates, gradients: optax.Updates) -> None:
  described = [
    jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    for tree in (total, gradients)
  ]
  if described[0] != described[1]:
    raise ValueError(
      "gradients must have the shapes and types of the accumulator,"
      f" {described[0]}, got {described[1]}."
    )


def divided(total: jax.Array, count: jax.Array) -> jax.Array:
  """Divides, with one rounding, by a count that broadcasts against `total`.

  XLA turns a division by a broadcast scalar into a product with its reciprocal,
  which rounds twice. A divisor that depends on the element prevents that; 0 / 1
  equals 0 / count, including the sign.
  """
  one = jnp.ones((), total.dtype)
  return rounded(total / jnp.where(total == 0, one, count.astype(total.dtype)))


def check_reduction(reduction: str) -> None:
  """Raises ValueError if the reduction is unknown."""
  if reduction not in REDUCTIONS:
    raise ValueError(
      f"reduction must be one of {REDUCTIONS}, got {reduction!r}."
    )
