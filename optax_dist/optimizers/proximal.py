"""Proximal gradient descent and Adagrad: a step, then L1 and L2 shrinkage."""

import jax
import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
)


def proximal_gradient_descent(
  learning_rate: hyperparameters.ScalarOrSchedule,
  l1_regularization_strength: hyperparameters.Scalar = 0.0,
  l2_regularization_strength: hyperparameters.Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient descent with a proximal operator for L1 and L2.

  .. math::
    p = w - \eta g, \quad w \leftarrow
    \operatorname{sign}(p) \max(|p| - \eta \lambda_1, 0) / (1 + \eta \lambda_2)

  With a sparse gradient only the touched rows shrink.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.

  Returns:
    The transformation. It keeps no slots. ``update`` needs the parameters.

  Source: ``tf.compat.v1.train.ProximalGradientDescentOptimizer``; Duchi and
  Singer, `Efficient Learning using Forward-Backward Splitting
  <https://papers.nips.cc/paper/3793>`_, 2009.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = proximal_gradient_descent(1.0, 0.5, 1.0)
    >>> params = jnp.array([2.0, 0.1])
    >>> grads = jnp.array([-0.5, 0.0])
    >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
    >>> (params + updates).tolist()
    [1.0, 0.0]
  """
  hyperparameters.check_numbers(
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
  )

  def apply_rule(grad, param, slots, step):
    new = _shrink(
      param - step.learning_rate * grad,
      step.learning_rate,
      l1_regularization_strength,
      l2_regularization_strength,
    )
    return new - param, slots

  optimizer = leaf_rule.base_custom(
    apply_rule, learning_rate, sum_duplicates=True, needs_params=True
  )
  return complex_numbers.real_only("proximal_gradient_descent", optimizer)


def proximal_adagrad(
  learning_rate: hyperparameters.ScalarOrSchedule,
  initial_accumulator_value: float = 0.1,
  l1_regularization_strength: hyperparameters.Scalar = 0.0,
  l2_regularization_strength: hyperparameters.Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Adagrad with a proximal operator for L1 and L2.

  .. math::
    a \leftarrow a + g^2, \quad r = \eta / \sqrt{a}, \quad p = w - r g, \quad
    w \leftarrow \operatorname{sign}(p) \max(|p| - r \lambda_1, 0) /
      (1 + r \lambda_2)

  With a sparse gradient only the touched rows shrink.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    initial_accumulator_value: Initial value of the accumulator, > 0.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.

  Returns:
    The transformation. Its slot is ``accumulator``. ``update`` needs the
    parameters.

  Raises:
    ValueError: If ``initial_accumulator_value`` is not positive.

  Source: ``tf.compat.v1.train.ProximalAdagradOptimizer``; Duchi and Singer,
  `Efficient Learning using Forward-Backward Splitting
  <https://papers.nips.cc/paper/3793>`_, 2009.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = proximal_adagrad(1.0, 4.0, l1_regularization_strength=1.0)
    >>> params = jnp.array([2.0, 0.1])
    >>> updates, _ = optimizer.update(
    ...   jnp.zeros(2), optimizer.init(params), params)
    >>> (params + updates).tolist()
    [1.5, 0.0]
  """
  hyperparameters.check_numbers(
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
  )
  hyperparameters.check_positive(
    initial_accumulator_value=initial_accumulator_value
  )

  def apply_rule(grad, param, slots, step):
    squares = slots["accumulator"] + jnp.square(grad)
    rate = step.learning_rate * jax.lax.rsqrt(squares)
    new = _shrink(
      param - grad * rate,
      rate,
      l1_regularization_strength,
      l2_regularization_strength,
    )
    return new - param, {"accumulator": squares}

  optimizer = leaf_rule.base_custom(
    apply_rule,
    learning_rate,
    slots={"accumulator": initial_accumulator_value},
    sum_duplicates=True,
    needs_params=True,
  )
  return complex_numbers.real_only("proximal_adagrad", optimizer)


def _shrink(value, rate, l1, l2):
  """Applies the proximal operator of L1 and L2 at a rate."""
  if not (hyperparameters.is_static(l1) and l1 == 0):
    threshold = rate * hyperparameters.cast(l1, value.dtype)
    value = jnp.sign(value) * jnp.maximum(jnp.abs(value) - threshold, 0)
  return value / (1 + rate * hyperparameters.cast(l2, value.dtype))
