"""Ftrl-proximal."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
)


def ftrl(
  learning_rate: hyperparameters.ScalarOrSchedule,
  learning_rate_power: float = -0.5,
  initial_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
  l2_shrinkage_regularization_strength: float = 0.0,
  beta: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Follow the regularized leader, with L1, L2 and shrinkage.

  .. math::
    a' &= a + g^2, \quad \sigma = (a'^{-p} - a^{-p}) / \eta \\
    z &\leftarrow z + g + 2 \lambda_s w - \sigma w \\
    w &\leftarrow \begin{cases}
      \dfrac{\operatorname{sign}(z) \lambda_1 - z}
            {a'^{-p} / \eta + 2 \lambda_2 + \beta / \eta}
        & |z| > \lambda_1 \\
      0 & \text{else}
    \end{cases}, \quad a \leftarrow a'

  The accumulator adds the gradient without the shrinkage. With a sparse
  gradient only the touched rows are recomputed.

  Args:
    learning_rate: A positive number, a scalar array or a schedule; a divisor. Where
      it comes to 0 nothing changes (TensorFlow raises an error).
    learning_rate_power: :math:`p`, at most 0; 0 gives a constant rate.
    initial_accumulator_value: Initial value of :math:`a`, at least 0.
    l1_regularization_strength: :math:`\lambda_1`, at least 0.
    l2_regularization_strength: :math:`\lambda_2`, at least 0.
    l2_shrinkage_regularization_strength: :math:`\lambda_s`, at least 0.
    beta: :math:`\beta`; ``None`` means 0.

  Returns:
    The transformation. Its slots are ``accum``, :math:`a`, and ``linear``,
    :math:`z`, from 0. ``update`` needs the parameters.

  Raises:
    ValueError: If an argument is out of its range.

  Source: ``tf.compat.v1.train.FtrlOptimizer``; McMahan et al., `Ad Click
  Prediction: a View from the Trenches
  <https://research.google/pubs/pub41159/>`_, 2013.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = ftrl(1.0, initial_accumulator_value=0.0)
    >>> params = jnp.zeros(2)
    >>> grads = jnp.array([4.0, 0.0])
    >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
    >>> (params + updates).tolist()
    [-1.0, 0.0]
  """
  _check_power(learning_rate_power, beta)
  hyperparameters.check_not_negative(
    initial_accumulator_value=initial_accumulator_value,
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
    l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
  )

  def apply_rule(grad, param, slots, step):
    dtype = grad.dtype
    # The rule divides by the rate. Where a schedule is at 0, nothing changes.
    moves = jnp.asarray(step.learning_rate) > 0
    rate = jnp.where(moves, step.learning_rate, 1)
    l1 = hyperparameters.cast(l1_regularization_strength, dtype)
    l2 = hyperparameters.cast(l2_regularization_strength, dtype)
    shrinkage = hyperparameters.cast(
      l2_shrinkage_regularization_strength, dtype
    )
    if beta is not None:
      floored = jnp.maximum(jnp.asarray(rate, dtype), 1e-36)
      l2 = l2 + hyperparameters.cast(beta, dtype) / (2 * floored)
    accum = slots["accum"] + jnp.square(grad)
    new_power, old_power = (
      _power(x, learning_rate_power) for x in (accum, slots["accum"])
    )
    shrunk = grad
    if not (hyperparameters.is_static(shrinkage) and shrinkage == 0):
      shrunk = grad + 2 * shrinkage * param
    linear = slots["linear"] + (shrunk - (new_power - old_power) / rate * param)
    new = _minimum(linear, new_power / rate + 2 * l2, l1)
    return jnp.where(moves, new - param, 0), {
      "accum": jnp.where(moves, accum, slots["accum"]),
      "linear": jnp.where(moves, linear, slots["linear"]),
    }

  optimizer = leaf_rule.base_custom(
    apply_rule,
    learning_rate,
    slots={"accum": initial_accumulator_value, "linear": 0.0},
    sum_duplicates=True,
    needs_params=True,
  )
  hyperparameters.check(
    "learning_rate", learning_rate, lambda x: x > 0, "positive"
  )
  return complex_numbers.real_only("ftrl", optimizer)


def _check_power(learning_rate_power: float, beta: float | None) -> None:
  hyperparameters.check_numbers(
    learning_rate_power=learning_rate_power,
    beta=0.0 if beta is None else beta,
  )
  hyperparameters.check(
    "learning_rate_power",
    learning_rate_power,
    lambda x: x <= 0,
    "negative or zero",
  )


def _minimum(linear: jax.Array, quadratic: jax.Array, l1: Any) -> jax.Array:
  """Where ``linear * w + quadratic * w**2 / 2 + l1 * |w|`` is least."""
  active = jnp.abs(linear) > l1
  # The unused branch of the quotient may be 0 / 0.
  divisor = jnp.where(active, quadratic, 1)
  return jnp.where(active, (l1 * jnp.sign(linear) - linear) / divisor, 0)


def _power(value: jax.Array, exponent: hyperparameters.Scalar) -> jax.Array:
  """Returns a number to the power of ``-exponent``."""
  # A root is faster and more accurate than a general power.
  if hyperparameters.is_static(exponent):
    if exponent == -0.5:
      return jnp.sqrt(value)
    if exponent == 0:
      return jnp.ones_like(value)
  return value ** -hyperparameters.cast(exponent, value.dtype)
