"""RETURNN's GradVarianceScaled: smaller steps for unusual gradients."""

import jax.numpy as jnp
import optax

from optax_dist._internal.indexed_slices import values_of
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
)
from optax_dist.sparse import rows


def grad_variance_scaled(
  learning_rate: hyperparameters.ScalarOrSchedule,
  beta1: hyperparameters.Scalar = 0.9,
  beta2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient descent, scaled down if a gradient is far from its average.

  .. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad d = (g - m)^2, \quad
    v \leftarrow \beta_2 v + (1 - \beta_2) d \\
    w &\leftarrow w - \eta g \min(v / (d + \epsilon), 1)

  with the new :math:`m` and :math:`v`. With a sparse gradient the averages of
  all rows decay and the touched rows move; repeated indices are not summed
  first, each has its own :math:`d`.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the average gradient.
    beta2: Decay of the average variance.
    epsilon: Added to the denominator.

  Returns:
    The transformation. Its slots are ``m`` and ``v``, from 0.

  Source: ``returnn.tf.updater.GradVarianceScaledOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = grad_variance_scaled(1.0, beta1=0.5, beta2=0.5)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> [f"{x:.3f}" for x in optimizer.update(jnp.full(1, 2.0), state)[0]]
    ['-1.000']
  """
  hyperparameters.check_numbers(beta1=beta1, beta2=beta2, epsilon=epsilon)

  def rule(grad, param, slots, step):
    del param
    values = values_of(grad)
    m = moments.average(slots["m"], beta1, grad, values)
    deviation = complex_numbers.abs_square(values - rows.read_rows(m, grad))
    v = moments.average(slots["v"], beta2, grad, deviation)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    factor = jnp.minimum(rows.read_rows(v, grad) / (deviation + eps), 1)
    update = -step.learning_rate * (values * factor)
    return rows.like_gradient(update, grad), {"m": m, "v": v}

  return leaf_rule.base_custom(
    rule,
    learning_rate,
    slots={"m": 0.0, "v": 0.0},
    sparse_apply_rule=rule,
  )
