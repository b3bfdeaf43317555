"""The optimizers of RETURNN's TensorFlow backend, by their classes' names."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from optax_dist.optimizers._internal import hyperparameters
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
from optax_dist.optimizers.keras import keras, keras_arguments
from optax_dist.optimizers.neural_optimizer1 import neural_optimizer1
from optax_dist.optimizers.proximal import (
  proximal_adagrad,
  proximal_gradient_descent,
)
from optax_dist.optimizers.returnn.options import Options
from optax_dist.optimizers.rmsprop import rmsprop

Factory = Callable[..., optax.GradientTransformationExtraArgs]

# RETURNN looks in its own module first, then in tf.compat.v1.train, then in
# Keras; the first match wins. So "Nadam" is RETURNN's own and "Adam" is
# TensorFlow's, and only the names below are left for Keras.
_CLASSES: dict[str, Factory] = {
  "AdadeltaOptimizer": adadelta,
  "AdagradDAOptimizer": adagrad_da,
  "AdagradOptimizer": adagrad,
  "AdamOptimizer": adam,
  "AMSGradOptimizer": amsgrad,
  "CustomAdamOptimizer": custom_adam,
  "CustomGradientDescentOptimizer": custom_gradient_descent,
  "FtrlOptimizer": ftrl,
  "GradientDescentOptimizer": gradient_descent,
  "GradVarianceScaledOptimizer": grad_variance_scaled,
  "MomentumOptimizer": momentum,
  "NadamOptimizer": nadam,
  "NeuralOptimizer1": neural_optimizer1,
  "NormalizedSGD": normalized_sgd,
  "ProximalAdagradOptimizer": proximal_adagrad,
  "ProximalGradientDescentOptimizer": proximal_gradient_descent,
  "RMSPropOptimizer": rmsprop,
}
_KERAS_CLASSES = {"Adamax": "Adamax", "NadamKeras": "Nadam", "SGD": "SGD"}

# The options that RETURNN read, in this order, before it had `optimizer`. Its Nadam of
# that time is Keras's with TensorFlow 2.
_OLD_NAMES = {
  "adam": "adam",
  "nadam": "NadamKeras",
  "adadelta": "adadelta",
  "adagrad": "adagrad",
}

# Arguments of TensorFlow's classes that have no meaning here.
_IGNORED = ("name", "use_locking")
_IGNORED_OF: dict[Factory, tuple[str, ...]] = {
  ftrl: ("accum_name", "linear_name")
}
# RETURNN's wrapper of Keras's classes doesn't clip gradients, whatever they are given.
_NOT_CLIPPED = ("clipnorm", "clipvalue", "global_clipnorm")


def optimizer(
  arguments: Mapping[str, Any],
  learning_rate: hyperparameters.ScalarOrSchedule,
  options: Options,
) -> optax.GradientTransformationExtraArgs:
  """Creates an optimizer from the value of RETURNN's ``optimizer``.

  Args:
    arguments: The class and its arguments.
    learning_rate: The learning rate.
    options: The other options, of which it reads ``optimizer_epsilon`` and
      ``momentum``.
  """
  arguments = dict(arguments)
  name = arguments.pop("class")
  factory, known = _find(name)
  multiplier = arguments.pop("learning_rate_multiplier", None)
  ignored = (*_IGNORED, *_IGNORED_OF.get(factory, ()))
  if isinstance(factory, functools.partial):
    ignored += _NOT_CLIPPED
  unknown = sorted(set(arguments) - set(known) - set(ignored))
  if unknown:
    extra = ("learning_rate_multiplier", *ignored)
    raise ValueError(
      f"arguments of {name} must be among {', '.join((*known, *extra))}, got"
      f" {', '.join(unknown)}"
    )
  for key in ignored:
    arguments.pop(key, None)
  if "epsilon" in known:
    epsilon = options.number("optimizer_epsilon", 1e-16)
    arguments.setdefault("epsilon", epsilon)
  momentum = options.number("momentum")
  if "momentum" in known and momentum:
    arguments.setdefault("momentum", momentum)
  missing = [key for key in known if known[key] and key not in arguments]
  if missing:
    raise ValueError(f"{name} needs the arguments {', '.join(missing)}")
  arguments["learning_rate"] = _scaled(learning_rate, multiplier)
  return factory(**arguments)


def by_old_names(options: Options) -> dict[str, Any] | None:
  """The value of ``optimizer`` that older options stand for; None for none.

  Source: ``returnn.tf.updater.Updater._create_default_optimizer``.
  """
  for name, of_class in _OLD_NAMES.items():
    if options.is_on(name):
      if options.number("momentum"):
        raise ValueError(f"momentum must be 0 with {name}, as in RETURNN")
      return {"class": of_class}
  decay = options.get("rmsprop")
  if isinstance(decay, float):  # Including 0.0.
    return {"class": "rmsprop", "decay": decay}
  if options.is_on("rmsprop"):
    return {"class": "rmsprop"}
  return {"class": "momentum"} if options.number("momentum") else None


def returnn_class_names() -> list[str]:
  """Lists the class names :func:`from_returnn_config` knows, with suffixes.

  Example:
    >>> returnn_class_names()[:3]
    ['AMSGradOptimizer', 'AdadeltaOptimizer', 'AdagradDAOptimizer']
  """
  return sorted((*_CLASSES, *_KERAS_CLASSES))


def _find(name: Any) -> tuple[Factory, dict[str, bool]]:
  """Finds a class: its factory, its arguments and whether they are required."""
  wanted = name.lower() if isinstance(name, str) else name
  if wanted in ("basecustom", "basecustomoptimizer"):
    raise ValueError(
      "class must not be BaseCustomOptimizer, which is abstract: give its rule"
      " to optax_dist.optimizers.base_custom"
    )
  for key, factory in _CLASSES.items():
    if wanted in (key.lower(), key.removesuffix("Optimizer").lower()):
      parameters = inspect.signature(factory).parameters
      return factory, {
        argument: parameter.default is inspect.Parameter.empty
        for argument, parameter in parameters.items()
        if argument != "learning_rate"
      }
  for key, keras_name in _KERAS_CLASSES.items():
    if wanted == key.lower():
      known = keras_arguments(keras_name)
      return (
        # RETURNN's wrapper never advances Keras's iterations.
        functools.partial(keras, keras_name, frozen_iterations=True),
        {argument: False for argument in known if argument != "learning_rate"},
      )
  raise ValueError(
    f"class must be one of {returnn_class_names()} (in any case, with or"
    f" without 'Optimizer'), got {name!r}. Classes of RETURNN's PyTorch backend need"
    ' backend="torch"'
  )


def _scaled(learning_rate, multiplier):
  if multiplier is None:
    return learning_rate
  if callable(learning_rate):
    return lambda count: multiplier * learning_rate(count)
  return multiplier * learning_rate
