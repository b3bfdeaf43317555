"""The optimizers of RETURNN's PyTorch backend: PyTorch's rules, built on optax."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import step_count
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
)
from optax_dist.optimizers.keras import keras
from optax_dist.optimizers.returnn import gradients
from optax_dist.optimizers.returnn.options import Options

#: PyTorch's arguments that change the speed of the computation, not its result.
_IGNORED = ("foreach", "capturable", "differentiable", "fused")
#: Options that RETURNN's PyTorch backend itself refuses.
_REFUSED = (
  "gradient_clip_norm",
  "gradient_clip_avg_norm",
  "global_norm_tag",
  "gradient_clip_global_norm_tag",
  "grad_norm_to_clip_to_zero",
  "maximize_grad_norm",
  "gradient_nan_inf_filter",
  "grad_clip",
)
_OTHERS = {
  "adafactor": "optax.adafactor, whose rule is another one",
  "asgd": "optax.sgd, without the average",
  "lbfgs": "optax.lbfgs, whose line search is another one",
  "muon": "optax.contrib.muon, whose scaling is another one",
  "returnn.torch.optim.lion.lion": "optax.lion, which is its default",
  "rprop": "optax.rprop, whose first step is another one",
  "sparseadam": "optax_dist.optimizers.custom_adam, with TensorFlow's epsilon",
}


def optimizer(
  arguments: Mapping[str, Any],
  learning_rate: hyperparameters.ScalarOrSchedule,
  weight_decay_mask: Any,
) -> optax.GradientTransformationExtraArgs:
  """Creates an optimizer from the value of RETURNN's ``optimizer``.

  Args:
    arguments: The class and its arguments.
    learning_rate: The learning rate.
    weight_decay_mask: Which parameters RETURNN decays, as ``optax.masked``
      takes it; True for all.

  Source: ``returnn.torch.updater.Updater._create_optimizer`` and
  ``torch.optim``.
  """
  arguments = dict(arguments)
  name = arguments.pop("class")
  rule = _find(name)
  defaults = {
    key: parameter.default
    for key, parameter in inspect.signature(rule).parameters.items()
  }
  known = defaults | _SHARED[rule]
  if "epsilon" in arguments and "eps" in defaults:
    arguments["eps"] = arguments.pop("epsilon")
  for key in _IGNORED:
    arguments.pop(key, None)
  unknown = sorted(set(arguments) - set(known))
  if unknown:
    raise ValueError(
      f"arguments of {name} must be among {', '.join((*known, *_IGNORED))}, got"
      f" {', '.join(unknown)}"
    )
  decay = arguments.get("weight_decay")
  options = known | arguments
  weight_decay = options.pop("weight_decay")
  is_decoupled = options.pop("decoupled_weight_decay", rule is _adamw)
  ascends = options.pop("maximize")
  if decay and weight_decay_mask is None:
    raise ValueError(
      "weight_decay_mask must say which parameters decay: RETURNN leaves out"
      " biases and the parameters of torch.nn.LayerNorm and torch.nn.Embedding,"
      " or of weight_decay_modules_blacklist. Give a tree of booleans, a function"
      " of the parameters, or True for all"
    )
  parts = [optax.scale(-1.0)] if ascends else []
  direction = rule(**options)
  if not weight_decay:
    parts.append(direction)
  else:
    # A decay that is PyTorch's default is that of all parameters.
    mask = weight_decay_mask if decay else True
    added = optax.add_decayed_weights(
      weight_decay, None if mask is True else mask
    )
    parts += [direction, added] if is_decoupled else [added, direction]
  rate = hyperparameters.checked_rate(learning_rate)
  parts.append(optax.scale_by_learning_rate(rate))
  tx = optax.chain(*parts)
  # Whatever its parts count.
  init = step_count.counted_outside(tx.init)
  return step_count.counted(
    optax.GradientTransformationExtraArgs(init, tx.update)
  )


def before(
  optimizer: optax.GradientTransformationExtraArgs, options: Options
) -> optax.GradientTransformationExtraArgs:
  """Puts RETURNN's changes of gradients before an optimizer, in its order.

  Unlike the TensorFlow backend, it clips by the norm of the gradient that it has
  summed, made noisy and clipped.

  Source: ``returnn.torch.updater.Updater.step``.
  """
  for name in _REFUSED:
    if options.is_on(name):
      raise ValueError(
        f"{name} must be off with the torch backend, as in RETURNN, got"
        f" {options.get(name)!r}"
      )
  if options.get("num_allowed_consec_invalid_gradient_steps") is not None:
    raise ValueError(
      "num_allowed_consec_invalid_gradient_steps ends the run in RETURNN, which a"
      " transformation can't: leave it out, and put optax.apply_if_finite(tx,"
      " max_consecutive_errors=...) around the optimizer"
    )
  parts: list[optax.GradientTransformation] = []
  if deviation := options.limit("gradient_noise"):
    parts.append(gradients.noise(deviation, options))
  if clip := options.limit("gradient_clip"):
    parts.append(optax.clip(clip))
  if norm := options.limit("gradient_clip_global_norm"):
    parts.append(_clip_global_norm(norm))
  tx = optax.chain(*parts, optimizer) if parts else optimizer
  return gradients.accumulated(tx, gradients.accumulated_steps(options))


def _clip_global_norm(limit: float) -> optax.GradientTransformation:
  """``torch.nn.utils.clip_grad_norm_``, with its 1e-6."""

  def clip(updates, params):
    del params
    norm = gradients.global_norm(updates)
    factor = jnp.minimum(limit / (norm + 1e-6), 1)
    return jax.tree.map(lambda x: gradients.scaled(x, factor), updates)

  return optax.stateless(clip)


def _find(name: Any) -> Callable[..., optax.GradientTransformation]:
  wanted = name.lower() if isinstance(name, str) else name
  if wanted in _RULES:
    return _RULES[wanted]
  if wanted in _OTHERS:
    raise ValueError(
      f"class {name!r} of PyTorch has no equal here: the nearest is"
      f" {_OTHERS[wanted]}"
    )
  raise ValueError(
    f"class must be one of PyTorch's {sorted(_RULES)} with the torch backend,"
    f" got {name!r}"
  )


def _adam(betas=(0.9, 0.999), eps=1e-8, amsgrad=False):
  if amsgrad:
    raise ValueError(
      "amsgrad must be False: optax.amsgrad takes the maximum of the corrected"
      " averages, PyTorch of the uncorrected ones"
    )
  return optax.scale_by_adam(*betas, eps)


# PyTorch gives them unlike defaults of weight_decay.
def _adamw(betas=(0.9, 0.999), eps=1e-8, amsgrad=False):
  return _adam(betas, eps, amsgrad)


def _sgd(momentum=0.0, dampening=0.0, nesterov=False):
  if dampening:
    raise ValueError(
      f"dampening must be 0, which optax.trace doesn't have, got {dampening}"
    )
  return optax.trace(momentum, nesterov) if momentum else optax.identity()


def _nadam(betas=(0.9, 0.999), eps=1e-8, momentum_decay=0.004):
  return _direction(
    "Nadam",
    beta_1=betas[0],
    beta_2=betas[1],
    epsilon=eps,
    schedule_decay=momentum_decay,
  )


def _adagrad(lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
  return _direction(
    "Adagrad",
    decay=lr_decay,
    initial_accumulator_value=initial_accumulator_value,
    epsilon=eps,
  )


def _direction(name, *, epsilon, **arguments):
  """The step of a Keras optimizer that has PyTorch's rule, before its rate."""
  hyperparameters.check_positive(eps=epsilon)
  tx = keras(name, learning_rate=1.0, epsilon=epsilon, **arguments)
  return optax.chain(tx, optax.scale(-1.0))


def _adamax(betas=(0.9, 0.999), eps=1e-8):
  return optax.scale_by_adamax(*betas, eps)


def _adadelta(rho=0.9, eps=1e-6):
  return optax.scale_by_adadelta(rho, eps)


def _rmsprop(alpha=0.99, eps=1e-8, momentum=0.0, centered=False):
  scale = optax.scale_by_stddev if centered else optax.scale_by_rms
  tx = scale(alpha, eps, eps_in_sqrt=False)
  return optax.chain(tx, optax.trace(momentum)) if momentum else tx


def _radam(betas=(0.9, 0.999), eps=1e-8):
  """RAdam; unlike optax's, epsilon is added to the uncorrected root."""
  beta1, beta2 = betas
  limit = 2 / (1 - beta2) - 1
  fade = -math.log(beta2)

  def rule(grad, param, slots, step):
    del param
    m = moments.average(slots["m"], beta1, grad, grad)
    squares = complex_numbers.abs_square(grad)
    v = moments.average(slots["v"], beta2, grad, squares)
    t = (step.count + 1).astype(hyperparameters.wide_dtype(grad.dtype))
    # limit - 2 t beta2^t / (1 - beta2^t), a small difference of large numbers.
    x = fade * t
    series = x / 2 - x**2 / 12 + x**4 / 720 - x**6 / 30240
    share = jnp.where(x < 0.5, series, 1 - x / jnp.expm1(x))
    length = (limit - 2 / fade) + 2 / fade * share
    square = (length - 4) * (length - 2) * limit
    square = square / ((limit - 4) * (limit - 2) * jnp.maximum(length, 1))
    root = jnp.sqrt(jnp.maximum(square, 0) * -jnp.expm1(-x))
    scale = root.astype(v.dtype) / (jnp.sqrt(v) + eps)
    corrected = m * (1 / (1 - beta1**t)).astype(v.dtype)
    return corrected * jnp.where(length > 5, scale, 1), {"m": m, "v": v}

  return leaf_rule.base_custom(rule, 1.0, slots={"m": 0.0, "v": 0.0})


_RULES: dict[Any, Callable[..., optax.GradientTransformation]] = {
  "adadelta": _adadelta,
  "adagrad": _adagrad,
  "adam": _adam,
  "adamax": _adamax,
  "adamw": _adamw,
  "nadam": _nadam,
  "radam": _radam,
  "rmsprop": _rmsprop,
  "sgd": _sgd,
}
# The arguments that they share, with PyTorch's defaults.
_SHARED: dict[Any, dict[str, Any]] = {
  rule: {"weight_decay": 0.0, "maximize": False} for rule in _RULES.values()
}
_SHARED[_adamw]["weight_decay"] = 0.01
for _rule in (_adam, _nadam, _radam):
  _SHARED[_rule]["decoupled_weight_decay"] = False
