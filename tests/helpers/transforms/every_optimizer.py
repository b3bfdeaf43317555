"""The optimizers by name, with their defaults, as functions of a learning rate."""

from optax_dist import optimizers
from optax_dist.optimizers.keras import KERAS_NAMES


def _keras(name):
  return lambda learning_rate: optimizers.keras(
    name, learning_rate=learning_rate
  )


BY_NAME = {
  "adadelta": optimizers.adadelta,
  "adagrad": optimizers.adagrad,
  "adagrad_da": optimizers.adagrad_da,
  "adam": optimizers.adam,
  # Its default epsilon, 0, would make parameters without a gradient NaN.
  "amsgrad": lambda rate: optimizers.amsgrad(rate, epsilon=1e-16),
  "custom_adam": optimizers.custom_adam,
  "custom_gradient_descent": optimizers.custom_gradient_descent,
  "ftrl": optimizers.ftrl,
  "grad_variance_scaled": optimizers.grad_variance_scaled,
  "gradient_descent": optimizers.gradient_descent,
  **{f"keras_{name.lower()}": _keras(name) for name in KERAS_NAMES},
  "momentum": lambda rate: optimizers.momentum(rate, 0.9),
  "nadam": optimizers.nadam,
  "neural_optimizer1": optimizers.neural_optimizer1,
  "normalized_sgd": optimizers.normalized_sgd,
  "proximal_adagrad": optimizers.proximal_adagrad,
  "proximal_gradient_descent": optimizers.proximal_gradient_descent,
  "rmsprop": optimizers.rmsprop,
}
