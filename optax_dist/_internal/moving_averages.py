"""Moving averages of parameters, updated with them.

A user evaluates with them; they move only when ``sync_replicas`` takes a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import checks
from optax_dist._internal.leaves import precision
from optax_dist.sparse.indexed_slices import apply_updates


def is_left_out(x: Any) -> bool:
  """Whether ``x`` is in the place of a parameter without an average."""
  return isinstance(x, optax.MaskedNode)


def check(decay: float | None, which: Any) -> None:
  """Checks the arguments of :func:`init`.

  Raises:
    ValueError: if the decay is not from 0 to 1, or is missing.
  """
  if decay is None and which is not None:
    raise ValueError(
      "`variables_to_average` needs `variable_averages`, the decay, got None."
    )
  if decay is not None:
    checks.fraction("variable_averages", decay, "a decay ")


def init(
  params: optax.Params, decay: float | None, which: Any, dtype: Any = None
) -> Any:
  """Returns the initial averages: the parameters themselves.

  Integers and random keys have none.

  Args:
    params: a pytree of arrays.
    decay: the decay, or None for no averages.
    which: a pytree of booleans like ``params`` (or a prefix of it), a function of
      ``params`` that returns one, or None for all.
    dtype: dtype of the averages, see :func:`precision.wide_dtype`.

  Returns:
    A pytree like ``params``, with ``optax.MaskedNode`` for excluded parameters;
    or None.

  Raises:
    ValueError: if ``which`` does not match ``params``.
  """
  if decay is None:
    return None
  if callable(which):
    which = which(params)

  def copy_leaf(x: jax.Array) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      return optax.MaskedNode()
    # A copy: it must not share a donated buffer with the parameters.
    return jnp.array(x, precision.wide_dtype(x, dtype))

  copy = lambda tree: jax.tree.map(copy_leaf, tree)
  if which is None:
    return copy(params)
  try:
    return jax.tree.map(
      lambda use, part: copy(part) if use else optax.MaskedNode(), which, params
    )
  except ValueError as error:
    raise ValueError(
      "`variables_to_average` must be a pytree of booleans like `params`, but"
      f" {error}"
    ) from error


def update(averages: Any, params: Any, updates: Any, decay: Any) -> Any:
  """Moves the averages towards the updated parameters.

  Args:
    averages: the result of :func:`init` or of this function.
    params: the parameters before the update.
    updates: their update.
    decay: the decay: ``average -= (1 - decay) * (average - parameter)``.

  Returns:
    The new averages.
  """
  if averages is None:
    return None

  def move(average, param):
    if is_left_out(average):
      return average
    rate = jnp.asarray(1.0 - decay, average.dtype)
    return average - rate * (average - precision.cast_like(param, average))

  new = apply_updates(params, updates)
  return jax.tree.map(move, averages, new, is_leaf=is_left_out)
