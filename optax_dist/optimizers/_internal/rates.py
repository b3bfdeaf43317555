"""Array learning rates for parameters of any dtype.

optax multiplies by an array without a cast: a float32 learning rate and
bfloat16 gradients give float32 updates, and a float32 momentum after the first
step. It does cast the value of a schedule, and a Python number adopts any
dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import hyperparameters


def scale_by_learning_rate(
  learning_rate: hyperparameters.ScalarOrSchedule, *, flip_sign: bool = True
) -> optax.GradientTransformation:
  """Like ``optax.scale_by_learning_rate``, but casts an array to each leaf.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    flip_sign: Whether to also multiply by -1.

  Returns:
    The transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> rate = scale_by_learning_rate(jnp.float32(0.5))
    >>> rate.update(jnp.ones(1, jnp.bfloat16), rate.init(None))[0]
    Array([-0.5], dtype=bfloat16)
  """
  hyperparameters.check_learning_rate(learning_rate)
  if _is_array(learning_rate):
    sign = -1 if flip_sign else 1
    return optax.stateless_with_tree_map(
      lambda update, _: (
        update * (sign * jnp.asarray(learning_rate, update.dtype))
      )
    )
  return optax.scale_by_learning_rate(
    hyperparameters.rounded(learning_rate), flip_sign=flip_sign
  )


def with_learning_rate(
  make: Callable[
    [hyperparameters.ScalarOrSchedule], optax.GradientTransformation
  ],
  learning_rate: hyperparameters.ScalarOrSchedule,
) -> optax.GradientTransformation:
  """Creates an optax optimizer whose last operation is the learning rate.

  Args:
    make: Creates it from a learning rate.
    learning_rate: A number, a scalar array or a schedule.

  Returns:
    The transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = with_learning_rate(optax.sgd, jnp.float32(0.5))
    >>> grad = jnp.ones(1, jnp.bfloat16)
    >>> optimizer.update(grad, optimizer.init(grad))[0]
    Array([-0.5], dtype=bfloat16)
  """
  hyperparameters.check_learning_rate(learning_rate)
  if _is_array(learning_rate):
    rate = scale_by_learning_rate(learning_rate, flip_sign=False)
    return optax.chain(make(1.0), rate)
  return make(hyperparameters.rounded(learning_rate))


def divided(
  learning_rate: hyperparameters.ScalarOrSchedule,
  divisor: Callable[[jax.Array], Any],
) -> Callable[[Any], jax.Array]:
  """Creates a schedule of a learning rate divided by a function of the step.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    divisor: Takes the number of steps before this one, as float32, or float64
      for a float64 learning rate.

  Returns:
    The schedule.

  Example:
    >>> schedule = divided(0.5, lambda count: 1 + count)
    >>> float(schedule(jnp.int32(1)))
    0.25
  """
  hyperparameters.check_learning_rate(learning_rate)

  def schedule(count):
    rate = learning_rate
    rate = rate(count) if callable(rate) else hyperparameters.rounded(rate)
    wide = hyperparameters.wide_dtype(jnp.asarray(rate).dtype)
    return jnp.asarray(rate, wide) / divisor(jnp.asarray(count, wide))

  return schedule


def _is_array(learning_rate):
  return not (
    callable(learning_rate) or hyperparameters.is_static(learning_rate)
  )
