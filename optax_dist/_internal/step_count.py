"""How an optimizer counts its steps, under a name that is unique in a state.

TensorFlow's scripts read the global step. Here it is `optax.tree.get(state,
"global_step")`, which finds one value or fails. So an optimizer calls its count
so, except inside a transform that has a global step of its own, such as
`sync_replicas`.
"""

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class GlobalStepState(NamedTuple):
  """The count of an optimizer that is the only one.

  Attributes:
    global_step: steps so far (int32 scalar).
  """

  global_step: jax.Array


class CountState(NamedTuple):
  """The count of an optimizer inside a transform with a global step.

  Attributes:
    count: steps so far (int32 scalar).
  """

  count: jax.Array  # type: ignore[assignment]


StepState = GlobalStepState | CountState

_is_counted_outside = contextvars.ContextVar(
  "is_counted_outside", default=False
)


def init() -> StepState:
  """Returns the count before the first step."""
  kind = CountState if _is_counted_outside.get() else GlobalStepState
  return kind(jnp.zeros([], jnp.int32))


def of(state: StepState) -> jax.Array:
  """Returns the number of steps so far, whatever its name."""
  return state[0]


def after(state: StepState) -> StepState:
  """Returns the count after another step."""
  return type(state)(optax.safe_increment(of(state)))


def counted(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Adds a count to an optimizer that keeps none if its rate is constant."""

  def update_fn(
    updates: optax.Updates,
    state: StepState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, StepState]:
    del params, extra_args
    return updates, after(state)

  counter = optax.GradientTransformationExtraArgs(
    lambda params: init(), update_fn
  )
  return optax.chain(tx, counter)


def counted_outside(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """Returns the `init` of a transformation inside a transform with a global step."""

  def init_fn(params: optax.Params) -> Any:
    token = _is_counted_outside.set(True)
    try:
      return init(params)
    finally:
      _is_counted_outside.reset(token)

  return init_fn
