"""The optimizers of TensorFlow 1 and RETURNN as optax transformations.

Each has the update rule, the initial state, the argument names and the defaults
of the original, so that a model trained there continues here along the same
trajectory. ``learning_rate`` may be a schedule, gradients may be
:class:`~optax_dist.IndexedSlices` or ``None``; apply the updates with
``optax_dist.apply_updates``.
"""

from optax_dist.optimizers._internal.leaf_rule import (
  CustomState,
  ScalarRule,
  Step,
  base_custom,
)
from optax_dist.optimizers.adagrad import adadelta, adagrad, adagrad_da
from optax_dist.optimizers.adam import adam, amsgrad, custom_adam, nadam
from optax_dist.optimizers.ftrl import ftrl
from optax_dist.optimizers.grad_variance_scaled import grad_variance_scaled
from optax_dist.optimizers.gradient_descent import (
  custom_gradient_descent,
  gradient_descent,
  momentum,
  normalized_sgd,
)
from optax_dist.optimizers.keras import keras
from optax_dist.optimizers.neural_optimizer1 import neural_optimizer1
from optax_dist.optimizers.proximal import (
  proximal_adagrad,
  proximal_gradient_descent,
)
from optax_dist.optimizers.returnn.config import from_returnn_config
from optax_dist.optimizers.returnn.learning_rates import returnn_learning_rates
from optax_dist.optimizers.returnn.tensorflow import returnn_class_names
from optax_dist.optimizers.rmsprop import rmsprop

__all__ = [
  "CustomState",
  "ScalarRule",
  "Step",
  "adadelta",
  "adagrad",
  "adagrad_da",
  "adam",
  "amsgrad",
  "base_custom",
  "custom_adam",
  "custom_gradient_descent",
  "from_returnn_config",
  "ftrl",
  "grad_variance_scaled",
  "gradient_descent",
  "keras",
  "momentum",
  "nadam",
  "neural_optimizer1",
  "normalized_sgd",
  "proximal_adagrad",
  "proximal_gradient_descent",
  "returnn_class_names",
  "returnn_learning_rates",
  "rmsprop",
]
