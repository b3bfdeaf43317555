"""Creates optimizers from RETURNN's configuration dictionaries."""

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

# Arguments of TensorFlow's classes that have no meaning here.
_IGNORED = ("name", "use_locking")
_IGNORED_OF: dict[Factory, tuple[str, ...]] = {
  ftrl: ("accum_name", "linear_name")
}
# RETURNN's wrapper of Keras's classes doesn't clip gradients, whatever they are given.
_NOT_CLIPPED = ("clipnorm", "clipvalue", "global_clipnorm")


def from_returnn_config(
  config: Mapping[str, Any] | str,
  learning_rate: hyperparameters.ScalarOrSchedule,
  *,
  optimizer_epsilon: float = 1e-16,
  momentum: float = 0.0,
  frozen_iterations: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Creates the optimizer of a RETURNN configuration's ``optimizer`` option.

  The class name is that of RETURNN's, TensorFlow 1's or Keras's class,
  case-insensitively and with or without a final ``Optimizer``: ``"adam"``,
  ``"AdamOptimizer"``, ``"NormalizedSGD"``. RETURNN's classes take precedence
  over TensorFlow's, and those over Keras's, of which ``"sgd"``, ``"adamax"``
  and ``"NadamKeras"`` are left.

  A class with an ``epsilon`` gets RETURNN's default, 1e-16, not its own.

  Args:
    config: ``{"class": name}`` with the class's arguments, or only the name.
      ``learning_rate_multiplier`` scales the learning rate; ``use_locking``,
      ``name`` and Ftrl's names of slots are ignored.
    learning_rate: The learning rate from RETURNN's ``learning_rate`` and
      schedule: a number, a scalar array or a schedule.
    optimizer_epsilon: RETURNN's global option of this name.
    momentum: RETURNN's global option of this name: if not 0, the default of
      classes with a ``momentum``.
    frozen_iterations: For Keras's classes, see
      :func:`~optax_dist.optimizers.keras`: as in RETURNN, whose wrapper never
      advances Keras's ``iterations``, and ignores clipping arguments.

  Returns:
    The transformation.

  Raises:
    ValueError: If ``config`` is neither a name nor a mapping, the class or an
      argument is unknown, the learning rate is set
      in ``config``, or an argument is missing or out of its range.

  Source: ``returnn.tf.updater.Updater._create_optimizer`` and
  ``get_optimizer_class``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = from_returnn_config(
    ...   {"class": "momentum", "momentum": 0.9, "learning_rate_multiplier": 0.5},
    ...   learning_rate=1.0)
    >>> optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))[0].tolist()
    [-0.5]
  """
  if isinstance(config, str):
    config = {"class": config}
  if not isinstance(config, Mapping):
    raise ValueError(
      "config must be the name of a class, or a mapping with a 'class' and its"
      f" arguments, got {config!r}"
    )
  arguments: dict[str, Any] = dict(config)
  if "class" not in arguments:
    raise ValueError(
      f"config must have a 'class', one of {returnn_class_names()}, got"
      f" {arguments}"
    )
  name = arguments.pop("class")
  factory, known = _find(name, frozen_iterations)
  if "learning_rate" in arguments:
    raise ValueError(
      "learning_rate must be an argument, not part of config, as in RETURNN, got"
      f" {arguments['learning_rate']} in config"
    )
  multiplier = arguments.pop("learning_rate_multiplier", None)
  ignored = (*_IGNORED, *_IGNORED_OF.get(factory, ()))
  if isinstance(factory, functools.partial) and frozen_iterations:
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
    arguments.setdefault("epsilon", optimizer_epsilon)
  if "momentum" in known and momentum:
    arguments.setdefault("momentum", momentum)
  missing = [key for key in known if known[key] and key not in arguments]
  if missing:
    raise ValueError(f"{name} needs the arguments {', '.join(missing)}")
  arguments["learning_rate"] = _scaled(learning_rate, multiplier)
  return factory(**arguments)


def returnn_class_names() -> list[str]:
  """Lists the class names :func:`from_returnn_config` knows, with suffixes.

  Example:
    >>> returnn_class_names()[:3]
    ['AMSGradOptimizer', 'AdadeltaOptimizer', 'AdagradDAOptimizer']
  """
  return sorted((*_CLASSES, *_KERAS_CLASSES))


def _find(name: Any, frozen: bool) -> tuple[Factory, dict[str, bool]]:
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
        functools.partial(keras, keras_name, frozen_iterations=frozen),
        {argument: False for argument in known if argument != "learning_rate"},
      )
  raise ValueError(
    f"class must be one of {returnn_class_names()} (in any case, with or"
    f" without 'Optimizer'), got {name!r}"
  )


def _scaled(learning_rate, multiplier):
  if multiplier is None:
    return learning_rate
  if callable(learning_rate):
    return lambda count: multiplier * learning_rate(count)
  return multiplier * learning_rate
