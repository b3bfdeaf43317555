"""Gradient descent with momentum."""

import optax

from optax_dist._internal import checks
from optax_dist.optimizers._internal import hyperparameters, rates, row_wise


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
  return row_wise.row_wise(
    rates.with_learning_rate(
      lambda rate: optax.sgd(
        rate, hyperparameters.rounded(momentum), nesterov=use_nesterov
      ),
      learning_rate,
    )
  )
