"""The rules of the legacy Keras optimizers; see :mod:`.keras`.

Each function takes the arguments of the Keras class of the same name, and
``frozen``: whether Keras's ``iterations`` stays at 0.
"""

import jax.numpy as jnp
import optax

from optax_dist._internal import checks, step_count
from optax_dist._internal.indexed_slices import values_of
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
)
from optax_dist.sparse import rows

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
  rate = optax.scale_by_learning_rate(_decayed(learning_rate, decay, frozen))
  if hyperparameters.is_static(momentum) and momentum == 0:
    return step_count.counted(rows.row_wise(rate, sum_duplicates=False))
  trace = optax.trace(hyperparameters.rounded(momentum), nesterov=nesterov)
  return step_count.counted(rows.row_wise(optax.chain(rate, trace)))


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
    optimizer = optax.chain(
      scale(hyperparameters.rounded(rho), hyperparameters.rounded(epsilon)),
      optax.scale_by_learning_rate(rate, flip_sign=False),
      optax.trace(hyperparameters.rounded(momentum)),
      optax.scale(-1.0),
    )
    return step_count.counted(rows.row_wise(optimizer))

  def rule(grad, param, slots, step):
    del param
    values = values_of(grad)
    sources = {"rms": complex_numbers.abs_square(values), "mg": values}
    slots = {
      name: moments.average(old, rho, grad, sources[name])
      for name, old in slots.items()
    }
    square = rows.read_rows(slots["rms"], grad)
    if centered:
      mean = rows.read_rows(slots["mg"], grad)
      square = square - complex_numbers.abs_square(mean)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    update = -step.learning_rate * (values / (jnp.sqrt(square) + eps))
    return rows.like_gradient(update, grad), slots

  return leaf_rule.base_custom(
    rule,
    rate,
    slots={"rms": 0.0, "mg": 0.0} if centered else {"rms": 0.0},
    sparse_apply_rule=rule,
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

  def powers(step, dtype):
    t = _time(step, frozen, dtype)
    return _power(beta_1, t), _power(beta_2, t)

  return moments.adam(
    _decayed(learning_rate, decay, frozen),
    beta_1,
    beta_2,
    epsilon,
    powers,
    amsgrad=amsgrad,
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
    wide = hyperparameters.wide_dtype(dtype)
    t = _time(step, frozen, wide)
    now, after = momentum(wide, t), momentum(wide, t + 1)
    product = step.scalars["momentum_cache"].astype(wide) * now
    factors = (
      (1 - now) / (1 - product),
      after / (1 - product * after),
      1 / (1 - _power(beta_2, t)),
    )
    return tuple(factor.astype(dtype) for factor in factors)

  def advance(product, step):
    return product * momentum(product.dtype, _time(step, frozen, product.dtype))

  def rule(grad, param, slots, step):
    del param
    values = values_of(grad)
    squares = complex_numbers.abs_square(values)
    m = moments.average(slots["m"], beta_1, grad, values)
    v = moments.average(slots["v"], beta_2, grad, squares)
    of_grad, of_m, of_v = coefficients(grad.dtype, step)
    ahead = of_grad * values + of_m * rows.read_rows(m, grad)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    root = jnp.sqrt(of_v * rows.read_rows(v, grad)) + eps
    update = -step.learning_rate * ahead / root
    return rows.like_gradient(update, grad), {"m": m, "v": v}

  return leaf_rule.base_custom(
    rule,
    hyperparameters.checked_rate(learning_rate),
    slots={"m": 0.0, "v": 0.0},
    scalars={"momentum_cache": leaf_rule.ScalarRule(1.0, advance)},
    sparse_apply_rule=rule,
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
    m = moments.average_by_difference(slots["m"], beta_1, grad, grad)
    v = jnp.maximum(b2 * slots["v"], jnp.abs(grad).astype(grad.dtype))
    t = _time(step, frozen, hyperparameters.wide_dtype(grad.dtype))
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
  hyperparameters.check_not_negative(decay=decay)
  rate = hyperparameters.checked_rate(learning_rate)
  if frozen or (hyperparameters.is_static(decay) and decay == 0):
    return rate
  return hyperparameters.divided(
    rate, lambda count: 1 + hyperparameters.cast(decay, count.dtype) * count
  )


def _time(step, frozen, dtype):
  """The step from 1, in the dtype for scalars."""
  if frozen:
    return jnp.ones([], dtype)
  return (step.count + 1).astype(dtype)


def _power(base, exponent):
  return hyperparameters.cast(base, exponent.dtype) ** exponent
