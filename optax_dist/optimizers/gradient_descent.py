"""Gradient descent: plain, normalized, and with momentum."""

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import checks, step_count
from optax_dist._internal.leaves import precision
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
)
from optax_dist.sparse import rows


def gradient_descent(
  learning_rate: hyperparameters.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  r"""Plain gradient descent: :math:`w \leftarrow w - \eta g`.

  This is ``optax.sgd``. A sparse gradient changes only its rows; repeated
  indices add up in the update.

  Args:
    learning_rate: A number, a scalar array or a schedule.

  Returns:
    The transformation. It keeps no slots.

  Source: ``tf.compat.v1.train.GradientDescentOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = gradient_descent(0.5)
    >>> optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))[0].tolist()
    [-0.5, -0.5]
  """
  rate = hyperparameters.checked_rate(learning_rate)
  return step_count.counted(
    rows.row_wise(optax.sgd(rate), sum_duplicates=False)
  )


def custom_gradient_descent(
  learning_rate: hyperparameters.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  r"""RETURNN's example of a custom optimizer: :func:`gradient_descent`.

  Args:
    learning_rate: A number, a scalar array or a schedule.

  Returns:
    The transformation. It keeps no slots.

  Source: ``returnn.tf.updater.CustomGradientDescentOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = custom_gradient_descent(0.5)
    >>> optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))[0].tolist()
    [-0.5, -0.5]
  """
  return gradient_descent(learning_rate)


def normalized_sgd(
  learning_rate: hyperparameters.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient descent along the normalized gradient of each leaf.

  .. math::
    w \leftarrow w - \eta g / \sqrt{\max(\textstyle\sum g^2, 10^{-12})}

  The norm is that of one leaf, not of the whole gradient as in
  ``optax.normalize_by_update_norm``. For a sparse gradient it is that of its
  values as given: repeated indices are counted separately.

  Args:
    learning_rate: A number, a scalar array or a schedule.

  Returns:
    The transformation. It keeps no slots.

  Source: ``returnn.tf.updater.NormalizedSGD``, ``tf.nn.l2_normalize``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = normalized_sgd(1.0)
    >>> grad = jnp.array([3.0, 4.0])
    >>> [f"{x:.3f}" for x in optimizer.update(grad, optimizer.init(grad))[0]]
    ['-0.600', '-0.800']
  """

  def apply_rule(grad, param, slots, step):
    del param
    # In float16, 1e-12 is 0, and many squares are 0 or infinite.
    wide = precision.wide_dtype(grad)
    square_sum = jnp.sum(complex_numbers.abs_square(grad.astype(wide)))
    inverse_norm = jax.lax.rsqrt(jnp.maximum(square_sum, 1e-12))
    normalized = (grad.astype(wide) * inverse_norm).astype(grad.dtype)
    return -step.learning_rate * normalized, slots

  return leaf_rule.base_custom(apply_rule, learning_rate)


def momentum(
  learning_rate: hyperparameters.ScalarOrSchedule,
  momentum: hyperparameters.Scalar,
  use_nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Momentum, with the learning rate outside the buffer.

  .. math::
    a &\leftarrow \mu a + g \\
    w &\leftarrow w - \eta a
    \quad\text{or, with use\_nesterov,}\quad
    w \leftarrow w - \eta (g + \mu a)

  This is ``optax.sgd(learning_rate, momentum, nesterov)``. With a sparse
  gradient it is lazy: an untouched row neither moves nor decays.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    momentum: Decay of the buffer.
    use_nesterov: Whether to look one step ahead.

  Returns:
    The transformation. Its slot is ``momentum``, the buffer, which starts at 0.

  Source: ``tf.compat.v1.train.MomentumOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = momentum(1.0, momentum=0.5)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> for _ in range(2):
    ...   updates, state = optimizer.update(jnp.ones(1), state)
    >>> updates.tolist()
    [-1.5]
  """
  checks.flag("use_nesterov", use_nesterov)
  hyperparameters.check_numbers(momentum=momentum)
  optimizer = optax.sgd(
    hyperparameters.checked_rate(learning_rate),
    hyperparameters.rounded(momentum),
    nesterov=use_nesterov,
  )
  return step_count.counted(rows.row_wise(optimizer))
