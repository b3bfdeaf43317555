"""The rules of the legacy Keras optimizers; see :mod:`.keras`.

Each function takes the arguments of the Keras class of the same name, and
``frozen``: whether Keras's ``iterations`` stays at 0.
"""

import jax.numpy as jnp
import optax

from optax_dist._internal import checks
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
  rates,
  row_wise,
)

DEFAULT_EPSILON = 1e-7


def sgd(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.01,
  momentum: hyperparameters.Scalar = 0.0,
  nesterov: bool = False,
  decay: hyperparameters.Scalar = 0.0,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's SGD."""
  checks.flag("nesterov", nesterov)
  _check_momentum(momentum)
  rate = rates.scale_by_learning_rate(_decayed(learning_rate, decay, frozen))
  if hyperparameters.is_static(momentum) and momentum == 0:
    return row_wise.row_wise(rate, sum_duplicates=False)
  trace = optax.trace(hyperparameters.rounded(momentum), nesterov=nesterov)
  return row_wise.row_wise(optax.chain(rate, trace))


def rmsprop(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  rho: hyperparameters.Scalar = 0.9,
  momentum: hyperparameters.Scalar = 0.0,
  epsilon: hyperparameters.Scalar | None = DEFAULT_EPSILON,
  centered: bool = False,
  decay: hyperparameters.Scalar = 0.0,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's RMSprop."""
  checks.flag("centered", centered)
  hyperparameters.check_numbers(rho=rho)
  _check_momentum(momentum)
  epsilon = _epsilon(epsilon)
  rate = _decayed(learning_rate, decay, frozen)
  if not (hyperparameters.is_static(momentum) and momentum == 0):
    scale = optax.scale_by_stddev if centered else optax.scale_by_rms
    return row_wise.row_wise(
      optax.chain(
        scale(hyperparameters.rounded(rho), hyperparameters.rounded(epsilon)),
        rates.scale_by_learning_rate(rate, flip_sign=False),
        optax.trace(hyperparameters.rounded(momentum)),
        optax.scale(-1.0),
      )
    )

  def direction(grad, rms, mg):
    square = rms if mg is None else rms - complex_numbers.abs_square(mg)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return grad / (jnp.sqrt(square) + eps)

  def apply_rule(grad, param, slots, step):
    del param
    p = hyperparameters.cast(rho, grad.dtype)
    rest = hyperparameters.complement(rho, grad.dtype)
    slots = dict(slots)
    slots["rms"] = p * slots["rms"] + rest * complex_numbers.abs_square(grad)
    if centered:
      slots["mg"] = p * slots["mg"] + rest * grad
    update = direction(grad, slots["rms"], slots.get("mg"))
    return -step.learning_rate * update, slots

  def sparse_apply_rule(slices, param, slots, step):
    del param
    grad = slices.values
    sources = {"rms": complex_numbers.abs_square(grad), "mg": grad}
    slots = {
      name: row_wise.decay_and_add(array, rho, slices, sources[name])
      for name, array in slots.items()
    }
    rows = {
      name: row_wise.read_rows(array, slices) for name, array in slots.items()
    }
    update = -step.learning_rate * direction(grad, rows["rms"], rows.get("mg"))
    return row_wise.like_gradient(update, slices), slots

  return leaf_rule.base_custom(
    apply_rule,
    rate,
    slots={"rms": 0.0, "mg": 0.0} if centered else {"rms": 0.0},
    sparse_apply_rule=sparse_apply_rule,
    sum_duplicates=True,
  )


def adagrad(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  initial_accumulator_value: hyperparameters.Scalar = 0.1,
  epsilon: hyperparameters.Scalar | None = DEFAULT_EPSILON,
  decay: hyperparameters.Scalar = 0.0,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's Adagrad."""
  hyperparameters.check_numbers(
    initial_accumulator_value=initial_accumulator_value
  )
  hyperparameters.check_not_negative(
    initial_accumulator_value=initial_accumulator_value
  )
  epsilon = _epsilon(epsilon)

  def apply_rule(grad, param, slots, step):
    del param
    squares = slots["accumulator"] + complex_numbers.abs_square(grad)
    root = jnp.sqrt(squares) + hyperparameters.cast(epsilon, grad.dtype)
    return -step.learning_rate * grad / root, {"accumulator": squares}

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots={"accumulator": initial_accumulator_value},
    sum_duplicates=True,
  )


def adam(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  beta_1: hyperparameters.Scalar = 0.9,
  beta_2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar | None = DEFAULT_EPSILON,
  amsgrad: bool = False,
  decay: hyperparameters.Scalar = 0.0,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's Adam, or AMSGrad."""
  checks.flag("amsgrad", amsgrad)
  hyperparameters.check_numbers(beta_1=beta_1, beta_2=beta_2)
  epsilon = _epsilon(epsilon)

  def rule(grad, step, averages, slots):
    m, v = averages
    new = {"m": m, "v": v}
    if amsgrad:
      new["vhat"] = jnp.maximum(slots["vhat"], v)
    _, t = _time(grad.dtype, step, frozen)
    rate = hyperparameters.in_wide_dtype(step.learning_rate, grad.dtype)
    rate = rate * jnp.sqrt(1 - _power(beta_2, t)) / (1 - _power(beta_1, t))
    root = jnp.sqrt(new.get("vhat", v))
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return -(m * rate.astype(grad.dtype)) / (root + eps), new

  def apply_rule(grad, param, slots, step):
    del param
    new = moments.averages(slots, grad, beta_1, beta_2)
    return rule(grad, step, new, slots)

  def sparse_apply_rule(slices, param, slots, step):
    del param
    new = moments.sparse_averages(slots, slices, beta_1, beta_2)
    return rule(slices.values, step, new, slots)

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots=dict.fromkeys(("m", "v", "vhat") if amsgrad else ("m", "v"), 0.0),
    sparse_apply_rule=sparse_apply_rule,
    sum_duplicates=True,
  )


def nadam(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  beta_1: hyperparameters.Scalar = 0.9,
  beta_2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar | None = DEFAULT_EPSILON,
  schedule_decay: hyperparameters.Scalar = 0.004,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's Nadam, whose momentum is scheduled."""
  hyperparameters.check_learning_rate(learning_rate)
  hyperparameters.check_numbers(
    beta_1=beta_1, beta_2=beta_2, schedule_decay=schedule_decay
  )
  epsilon = _epsilon(epsilon)

  def momentum(dtype, t):
    """Momentum of step t."""
    exponent = hyperparameters.cast(schedule_decay, dtype) * t
    base = jnp.asarray(0.96, dtype)
    b1 = hyperparameters.cast(beta_1, dtype)
    return b1 * (1 - 0.5 * base**exponent)

  def coefficients(dtype, step):
    """Factors of the gradient, of the mean and of the mean square."""
    wide, t = _time(dtype, step, frozen)
    now, after = momentum(wide, t), momentum(wide, t + 1)
    product = step.scalars["momentum_cache"].astype(wide) * now
    factors = (
      (1 - now) / (1 - product),
      after / (1 - product * after),
      1 / (1 - _power(beta_2, t)),
    )
    return tuple(factor.astype(dtype) for factor in factors)

  def advance(product, step):
    wide, t = _time(product.dtype, step, frozen)
    return product * momentum(wide, t)

  def direction(grad, m, v, step):
    of_grad, of_m, of_v = coefficients(grad.dtype, step)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    ahead = of_grad * grad + of_m * m
    return -step.learning_rate * ahead / (jnp.sqrt(of_v * v) + eps)

  def apply_rule(grad, param, slots, step):
    del param
    b1 = hyperparameters.cast(beta_1, grad.dtype)
    b2 = hyperparameters.cast(beta_2, grad.dtype)
    rest_1 = hyperparameters.complement(beta_1, grad.dtype)
    rest_2 = hyperparameters.complement(beta_2, grad.dtype)
    m = b1 * slots["m"] + rest_1 * grad
    v = b2 * slots["v"] + rest_2 * complex_numbers.abs_square(grad)
    return direction(grad, m, v, step), {"m": m, "v": v}

  def sparse_apply_rule(slices, param, slots, step):
    del param
    grad = slices.values
    m, v = moments.sparse_averages(slots, slices, beta_1, beta_2)
    update = direction(
      grad, row_wise.read_rows(m, slices), row_wise.read_rows(v, slices), step
    )
    return row_wise.like_gradient(update, slices), {"m": m, "v": v}

  return leaf_rule.base_custom(
    apply_rule,
    hyperparameters.rounded(learning_rate),
    slots={"m": 0.0, "v": 0.0},
    scalars={"momentum_cache": leaf_rule.ScalarRule(1.0, advance)},
    sparse_apply_rule=sparse_apply_rule,
    sum_duplicates=True,
  )


def adamax(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  beta_1: hyperparameters.Scalar = 0.9,
  beta_2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar | None = DEFAULT_EPSILON,
  decay: hyperparameters.Scalar = 0.0,
  *,
  frozen: bool,
) -> optax.GradientTransformationExtraArgs:
  """Creates Keras's Adamax."""
  hyperparameters.check_numbers(beta_1=beta_1, beta_2=beta_2)
  epsilon = _epsilon(epsilon)

  def apply_rule(grad, param, slots, step):
    del param
    b2 = hyperparameters.cast(beta_2, grad.dtype)
    rest_1 = hyperparameters.complement(beta_1, grad.dtype)
    m = slots["m"] + (grad - slots["m"]) * rest_1
    v = jnp.maximum(b2 * slots["v"], jnp.abs(grad).astype(grad.dtype))
    _, t = _time(grad.dtype, step, frozen)
    rate = hyperparameters.in_wide_dtype(step.learning_rate, grad.dtype)
    rate = rate / (1 - _power(beta_1, t))
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return -rate.astype(grad.dtype) * (m / (v + eps)), {"m": m, "v": v}

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots={"m": 0.0, "v": 0.0},
    sum_duplicates=True,
  )


def _check_momentum(momentum):
  hyperparameters.check_numbers(momentum=momentum)
  hyperparameters.check(
    "momentum", momentum, lambda x: 0 <= x <= 1, "between 0 and 1"
  )


def _epsilon(epsilon):
  """Keras computes the epsilon by ``epsilon or default``."""
  if epsilon is None:
    return DEFAULT_EPSILON
  hyperparameters.check_numbers(epsilon=epsilon)
  if hyperparameters.is_static(epsilon) and epsilon == 0:
    return DEFAULT_EPSILON
  return epsilon


def _decayed(learning_rate, decay, frozen):
  """The learning rate with Keras's time-inverse decay."""
  hyperparameters.check_learning_rate(learning_rate)
  hyperparameters.check_numbers(decay=decay)
  hyperparameters.check_not_negative(decay=decay)
  if frozen or (hyperparameters.is_static(decay) and decay == 0):
    return hyperparameters.rounded(learning_rate)
  return rates.divided(
    learning_rate,
    lambda count: 1 + hyperparameters.cast(decay, count.dtype) * count,
  )


def _time(dtype, step, frozen):
  """The step from 1, in the dtype for scalars, and that dtype."""
  wide = hyperparameters.wide_dtype(dtype)
  if frozen:
    return wide, jnp.ones([], wide)
  return wide, (step.count + 1).astype(wide)


def _power(base, exponent):
  return hyperparameters.cast(base, exponent.dtype) ** exponent
