"""RETURNN's NeuralOptimizer1: smaller steps against the average gradient."""

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


def neural_optimizer1(
  learning_rate: hyperparameters.ScalarOrSchedule,
  beta1: hyperparameters.Scalar = 0.9,
  decrease_factor: hyperparameters.Scalar = 0.1,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient descent that damps gradients opposed to their average.

  .. math::
    m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
    w \leftarrow w - \eta g \cdot
      \begin{cases}
        1 & \operatorname{sign}(g) = \operatorname{sign}(m) \\
        \text{decrease\_factor} & \text{else}
      \end{cases}

  with the new :math:`m`. With a sparse gradient the average of all rows decays
  and the touched rows move; repeated indices are not summed first, each
  compares its own sign.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the average.
    decrease_factor: Factor if the signs differ. The paper uses exp(-2).

  Returns:
    The transformation. Its slot is ``m``, from 0.

  Source: ``returnn.tf.updater.NeuralOptimizer1``; Bello et al., `Neural
  Optimizer Search with Reinforcement Learning
  <https://proceedings.mlr.press/v70/bello17a.html>`_, 2017.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = neural_optimizer1(1.0)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> for grad in (1.0, -0.5):
    ...   updates, state = optimizer.update(jnp.full(1, grad), state)
    ...   print(f"{updates[0]:.3f}")
    -1.000
    0.050
  """
  hyperparameters.check_numbers(beta1=beta1, decrease_factor=decrease_factor)

  def rule(grad, param, slots, step):
    del param
    values = values_of(grad)
    m = moments.average(slots["m"], beta1, grad, values)
    agrees = jnp.sign(rows.read_rows(m, grad)) == jnp.sign(values)
    factor = hyperparameters.cast(decrease_factor, grad.dtype)
    damped = values * jnp.where(agrees, jnp.ones_like(values), factor)
    return rows.like_gradient(-step.learning_rate * damped, grad), {"m": m}

  optimizer = leaf_rule.base_custom(
    rule,
    learning_rate,
    slots={"m": 0.0},
    sparse_apply_rule=rule,
  )
  return complex_numbers.real_only("neural_optimizer1", optimizer)
