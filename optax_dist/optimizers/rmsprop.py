"""RMSProp, plain or centered, with momentum."""

import optax

from optax_dist._internal import checks, step_count
from optax_dist.optimizers._internal import hyperparameters
from optax_dist.sparse import rows


def rmsprop(
  learning_rate: hyperparameters.ScalarOrSchedule,
  decay: hyperparameters.Scalar = 0.9,
  momentum: hyperparameters.Scalar = 0.0,
  epsilon: hyperparameters.Scalar = 1e-10,
  centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""RMSProp whose average starts at 1, with the learning rate inside the
  momentum.

  .. math::
    s &\leftarrow \rho s + (1 - \rho) g^2, \quad
    c \leftarrow \rho c + (1 - \rho) g \;\text{(centered, else 0)} \\
    b &\leftarrow \mu b + \eta g / \sqrt{s - c^2 + \epsilon}, \quad
    w \leftarrow w - b

  It consists of the parts of ``optax.rmsprop`` with ``initial_scale=1``, which
  is 0 by default. As in TensorFlow, there is a buffer even if ``momentum`` is
  0. With a sparse gradient it is lazy: untouched rows neither move nor decay.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    decay: :math:`\rho`, decay of the averages.
    momentum: :math:`\mu`, decay of the buffer.
    epsilon: Added inside the root.
    centered: Whether to divide by the deviation rather than the magnitude.

  Returns:
    The transformation. Its slots are ``rms``, :math:`s`, from 1, ``momentum``,
    :math:`b`, from 0, and, if centered, ``mg``, :math:`c`, from 0.

  Source: ``tf.compat.v1.train.RMSPropOptimizer``; Tieleman and Hinton, lecture
  6.5 of "Neural Networks for Machine Learning", 2012.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = rmsprop(0.5, decay=0.5, epsilon=0.0)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> updates = optimizer.update(jnp.full(1, 7.0**0.5), state)[0]
    >>> [f"{x:.4f}" for x in updates]
    ['-0.6614']
  """
  checks.flag("centered", centered)
  hyperparameters.check_numbers(decay=decay, momentum=momentum, epsilon=epsilon)
  rate = hyperparameters.checked_rate(learning_rate)
  scale = optax.scale_by_stddev if centered else optax.scale_by_rms
  optimizer = rows.row_wise(
    optax.chain(
      scale(
        hyperparameters.rounded(decay),
        hyperparameters.rounded(epsilon),
        initial_scale=1.0,
      ),
      # The sign is not flipped first, so that the buffer has TensorFlow's sign.
      optax.scale_by_learning_rate(rate, flip_sign=False),
      optax.trace(hyperparameters.rounded(momentum)),
      optax.scale(-1.0),
    )
  )
  return step_count.counted(optimizer)
