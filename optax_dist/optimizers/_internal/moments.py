"""Moving averages of gradients and of their squares, and the step of Adam.

The rules with averages are written once, for dense and for sparse gradients: of
a sparse one, all rows of an average decay, and the touched ones are added.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal.indexed_slices import is_indexed_slices, values_of
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
)
from optax_dist.sparse import rows


def average(
  old: jax.Array, decay: hyperparameters.Scalar, gradient: Any, values: Any
) -> jax.Array:
  """Returns the next moving average, ``decay * old + (1 - decay) * values``.

  Args:
    old: The moving average, an array.
    decay: Its decay.
    gradient: The gradient, dense or sparse.
    values: The values to average, like those of the gradient; of a sparse one,
      those of repeated indices add up.
  """
  decayed = hyperparameters.cast(decay, old.dtype) * old
  new = hyperparameters.complement(decay, values.dtype) * values
  if is_indexed_slices(gradient):
    return decayed.at[gradient.indices].add(new, mode="drop")
  return decayed + new


def average_by_difference(
  old: jax.Array, decay: hyperparameters.Scalar, gradient: Any, values: Any
) -> jax.Array:
  """Like :func:`average`, rounded as in TensorFlow's kernels of Adam.

  Of a dense gradient it is ``old + (1 - decay) * (values - old)``.
  """
  if is_indexed_slices(gradient):
    return average(old, decay, gradient, values)
  return old + (values - old) * hyperparameters.complement(decay, values.dtype)


def corrected_rate(
  step: leaf_rule.Step, dtype: Any, powers: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """The learning rate with Adam's bias corrections, in the leaf's dtype.

  Args:
    step: The step.
    dtype: The leaf's dtype.
    powers: The powers of both decays, in the dtype for scalars.
  """
  rate = hyperparameters.in_wide_dtype(step.learning_rate, dtype)
  rate = rate * jnp.sqrt(1 - powers[1]) / (1 - powers[0])
  return rate.astype(dtype)


def adam(
  learning_rate: hyperparameters.ScalarOrSchedule,
  beta1: hyperparameters.Scalar,
  beta2: hyperparameters.Scalar,
  epsilon: hyperparameters.Scalar,
  powers: Callable[[leaf_rule.Step, Any], tuple[jax.Array, jax.Array]],
  *,
  scalars: Mapping[str, leaf_rule.ScalarRule] | None = None,
  look_ahead: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
  amsgrad: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Creates Adam, or an optimizer that differs from it as follows.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the mean.
    beta2: Decay of the mean square.
    epsilon: Added to the root.
    powers: Returns the powers of both decays, from a step and a dtype.
    scalars: Scalars of the whole optimizer by name.
    look_ahead: Returns the direction of a step from the gradient and the mean;
      only the touched rows move. None for the mean; all rows move.
    amsgrad: Whether the root is that of the largest mean square so far.

  Returns:
    The transformation.
  """

  def rule(grad, param, slots, step):
    del param
    values = values_of(grad)
    squares = complex_numbers.abs_square(values)
    m = average_by_difference(slots["m"], beta1, grad, values)
    v = average_by_difference(slots["v"], beta2, grad, squares)
    new = {"m": m, "v": v}
    if amsgrad:
      v = new["vhat"] = jnp.maximum(slots["vhat"], v)
    if look_ahead:
      m, v = rows.read_rows(m, grad), rows.read_rows(v, grad)
      m = look_ahead(values, m)
    wide = hyperparameters.wide_dtype(grad.dtype)
    rate = corrected_rate(step, grad.dtype, powers(step, wide))
    eps = hyperparameters.cast(epsilon, grad.dtype)
    update = -(m * rate) / (jnp.sqrt(v) + eps)
    return rows.like_gradient(update, grad) if look_ahead else update, new

  return leaf_rule.base_custom(
    rule,
    learning_rate,
    slots=dict.fromkeys(("m", "v", "vhat") if amsgrad else ("m", "v"), 0.0),
    scalars=scalars,
    sparse_apply_rule=rule,
    sum_duplicates=True,
  )
