"""Inner transformations whose state keeps its structure.

A parameter without a gradient (None) is left alone by optax's transformations, but
some drop what they keep for it: the momentum in the new state is None. A state that
changes its structure can't pass a conditional, a scan or a checkpoint, and a later
gradient of that parameter finds no momentum.
"""

from typing import Any

import jax
import optax

from optax_dist._internal import checks, step_count


def with_steady_state(
  inner: optax.GradientTransformation,
  name: str = "inner",
  *,
  counts_steps: bool = True,
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that keeps the state of parameters without gradients.

  Args:
    inner: any transformation.
    name: the caller's argument that it is, for the message.
    counts_steps: whether the caller's state has a ``global_step``.

  Returns:
    The same transformation, which takes keyword arguments, and whose new state has
    the old one's arrays in place of None.

  Raises:
    ValueError: if it is not a transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> tx = with_steady_state(optax.trace(0.5))
    >>> state = tx.init({"w": jnp.ones(1), "step": jnp.array(3)})
    >>> tx.update({"w": jnp.ones(1), "step": None}, state)[1].trace["step"].item()
    0
  """
  checks.transformation(name, inner)
  inner = optax.with_extra_args_support(inner)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    try:
      updates, new = inner.update(updates, state, params, **extra_args)
    except TypeError as error:
      if "missing" not in str(error) or "required" not in str(error):
        raise
      what = "" if name == "inner" else ", which gets no keyword arguments,"
      raise TypeError(
        f"`{name}`{what} needs an argument: {error}. Pass it to update, as in"
        " update(gradients, state, params, value=loss), or use it as `inner`."
      ) from error
    return updates, _keep(state, new)

  init_fn = (
    step_count.counted_outside(inner.init) if counts_steps else inner.init
  )
  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _keep(old: Any, new: Any) -> Any:
  treedefs: list[Any] = [jax.tree.structure(x) for x in (old, new)]
  if treedefs[0] == treedefs[1]:
    return new
  try:
    return jax.tree.map(lambda x, y: x if y is None else y, old, new)
  except ValueError:
    return new  # Not only parts that are None.
