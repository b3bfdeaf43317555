"""The optimizers by name, for command lines."""

from collections.abc import Callable

import optax

from optax_dist.optimizers._internal import hyperparameters
from optax_dist.optimizers.adagrad import adadelta, adagrad, adagrad_da
from optax_dist.optimizers.adam import adam, custom_adam, nadam
from optax_dist.optimizers.amsgrad import amsgrad
from optax_dist.optimizers.ftrl import ftrl
from optax_dist.optimizers.grad_variance_scaled import grad_variance_scaled
from optax_dist.optimizers.gradient_descent import (
  custom_gradient_descent,
  gradient_descent,
  normalized_sgd,
)
from optax_dist.optimizers.keras import KERAS_NAMES, keras
from optax_dist.optimizers.momentum import momentum
from optax_dist.optimizers.neural_optimizer1 import neural_optimizer1
from optax_dist.optimizers.proximal import (
  proximal_adagrad,
  proximal_gradient_descent,
)
from optax_dist.optimizers.rmsprop import rmsprop

Factory = Callable[
  [hyperparameters.ScalarOrSchedule], optax.GradientTransformationExtraArgs
]


def _amsgrad(learning_rate):
  # The default epsilon, 0, would make parameters without a gradient NaN.
  return amsgrad(learning_rate, epsilon=1e-16)


def _momentum(learning_rate):
  return momentum(learning_rate, 0.9)


def _keras(name: str) -> Factory:
  return lambda learning_rate: keras(name, learning_rate=learning_rate)


REGISTRY: dict[str, Factory] = {
  "adadelta": adadelta,
  "adagrad": adagrad,
  "adagrad_da": adagrad_da,
  "adam": adam,
  "amsgrad": _amsgrad,
  "custom_adam": custom_adam,
  "custom_gradient_descent": custom_gradient_descent,
  "ftrl": ftrl,
  "grad_variance_scaled": grad_variance_scaled,
  "gradient_descent": gradient_descent,
  **{f"keras_{name.lower()}": _keras(name) for name in KERAS_NAMES},
  "momentum": _momentum,
  "nadam": nadam,
  "neural_optimizer1": neural_optimizer1,
  "normalized_sgd": normalized_sgd,
  "proximal_adagrad": proximal_adagrad,
  "proximal_gradient_descent": proximal_gradient_descent,
  "rmsprop": rmsprop,
}


def by_name(
  name: str, learning_rate: hyperparameters.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
  """Creates an optimizer with its defaults.

  Args:
    name: A key of ``REGISTRY``: the function's name, or ``keras_`` and the
      Keras class in lower case.
    learning_rate: A number, a scalar array or a schedule.

  Returns:
    The transformation. ``momentum`` uses 0.9, for which the original has no
    default; ``amsgrad`` uses RETURNN's epsilon, 1e-16, instead of 0.

  Raises:
    ValueError: If there is no optimizer of that name; lists the names.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = by_name("keras_sgd", 0.5)
    >>> optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))[0].tolist()
    [-0.5]
  """
  if name not in REGISTRY:
    raise ValueError(
      f"optimizer must be one of {', '.join(REGISTRY)}, got {name!r}"
    )
  return REGISTRY[name](learning_rate)
