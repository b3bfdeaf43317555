"""The legacy Keras optimizers by name.

Their rules differ from TensorFlow 1's of the same name: other defaults, the
learning rate inside of SGD's momentum, RMSprop from 0, Adagrad with an epsilon,
Nadam with a scheduled momentum.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from optax_dist.optimizers import hyperparameters, leaf_rule, row_wise

_DEFAULT_EPSILON = 1e-7


def keras(
  name: str, *, frozen_iterations: bool = False, **arguments: Any
) -> optax.GradientTransformationExtraArgs:
  r"""Makes a legacy Keras optimizer ("optimizer_v2", that of Keras 2).

  With :math:`t` the step from 1, :math:`\eta` the learning rate, divided by
  :math:`1 + \text{decay} \cdot (t - 1)` (an argument of all but Nadam):

  - ``SGD(learning_rate=0.01, momentum=0.0, nesterov=False)``:
    :math:`b \leftarrow \mu b - \eta g`, :math:`w \leftarrow w + b`, with
    nesterov :math:`w \leftarrow w + \mu b - \eta g`. Slot ``momentum`` if the
    momentum is not 0. Lazy.
  - ``RMSprop(learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7,
    centered=False)``: ``rmsprop``'s rule with averages from 0 if the momentum
    is not 0, and lazy; else :math:`w \leftarrow w - \eta g / (\sqrt{s - c^2} +
    \epsilon)`, and of a sparse gradient all averages decay. Slots ``rms``,
    ``momentum``, ``mg`` as they are needed.
  - ``Adagrad(learning_rate=0.001, initial_accumulator_value=0.1,
    epsilon=1e-7)``: :math:`a \leftarrow a + g^2`,
    :math:`w \leftarrow w - \eta g / (\sqrt a + \epsilon)`. Slot
    ``accumulator``. Lazy.
  - ``Adam(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7,
    amsgrad=False)``: ``adam``'s rule; with amsgrad the root is that of
    :math:`\hat v \leftarrow \max(\hat v, v)`. Slots ``m``, ``v``, ``vhat``.
    Sparse equals dense.
  - ``Nadam(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7,
    schedule_decay=0.004)``: with :math:`\mu_t = \beta_1 (1 - 0.5 \cdot
    0.96^{t \cdot \text{schedule\_decay}})` and :math:`\pi_t = \prod_{i \le t}
    \mu_i`, :math:`w \leftarrow w - \eta ((1 - \mu_t) g / (1 - \pi_t) +
    \mu_{t+1} m / (1 - \pi_t \mu_{t+1})) / (\sqrt{v / (1 - \beta_2^t)} +
    \epsilon)`. Slots ``m``, ``v``. Of a sparse gradient all averages decay.
  - ``Adamax(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7)``:
    :math:`m \leftarrow m + (1 - \beta_1) (g - m)`,
    :math:`v \leftarrow \max(\beta_2 v, |g|)`,
    :math:`w \leftarrow w - \eta m / ((1 - \beta_1^t) (v + \epsilon))`. Slots
    ``m``, ``v``. Lazy.

  An epsilon of 0 or ``None`` stands for 1e-7, as in Keras. Gradient clipping
  (``clipnorm`` and the like) is left to optax.

  Args:
    name: The class name; case does not matter.
    frozen_iterations: Whether Keras's ``iterations`` stays at 0, as it does in
      RETURNN's wrapper: whatever depends on the step keeps its first value.
      Only a ``learning_rate`` that is a schedule goes on.
    **arguments: Arguments of the class. ``learning_rate`` may be a schedule.

  Returns:
    The transformation.

  Raises:
    ValueError: If the name or an argument is not known, or an argument is out
      of its range.

  Source: ``tf_keras.optimizers.legacy``,
  ``returnn.tf.updater._KerasOptimizerWrapper``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = keras("SGD", learning_rate=0.5, momentum=0.9)
    >>> optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))[0].tolist()
    [-0.5]
  """
  makers = {key.lower(): maker for key, maker in _MAKERS.items()}
  if name.lower() not in makers:
    raise ValueError(f"name must be one of {', '.join(_MAKERS)}, got {name!r}")
  maker = makers[name.lower()]
  known = keras_arguments(name)
  unknown = sorted(set(arguments) - set(known))
  if unknown:
    raise ValueError(
      f"arguments of {name} must be among {', '.join(known)}, got"
      f" {', '.join(unknown)}"
    )
  return maker(**arguments, frozen=frozen_iterations)


def keras_arguments(name: str) -> tuple[str, ...]:
  """Lists the arguments that :func:`keras` takes for a class.

  Args:
    name: The class name; case does not matter.

  Returns:
    Their names.

  Example:
    >>> keras_arguments("adamax")
    ('learning_rate', 'beta_1', 'beta_2', 'epsilon', 'decay')
  """
  makers = {key.lower(): maker for key, maker in _MAKERS.items()}
  parameters = inspect.signature(makers[name.lower()]).parameters
  return tuple(key for key in parameters if key != "frozen")


def _sgd(
  learning_rate=0.01, momentum=0.0, nesterov=False, decay=0.0, *, frozen
):
  _check_momentum(momentum)
  rate = optax.scale_by_learning_rate(_decayed(learning_rate, decay, frozen))
  if hyperparameters.is_static(momentum) and momentum == 0:
    return row_wise.row_wise(rate, sum_duplicates=False)
  trace = optax.trace(hyperparameters.rounded(momentum), nesterov=nesterov)
  return row_wise.row_wise(optax.chain(rate, trace))


def _rmsprop(
  learning_rate=0.001,
  rho=0.9,
  momentum=0.0,
  epsilon=_DEFAULT_EPSILON,
  centered=False,
  decay=0.0,
  *,
  frozen,
):
  _check_momentum(momentum)
  epsilon = _epsilon(epsilon)
  rate = _decayed(learning_rate, decay, frozen)
  if not (hyperparameters.is_static(momentum) and momentum == 0):
    scale = optax.scale_by_stddev if centered else optax.scale_by_rms
    return row_wise.row_wise(
      optax.chain(
        scale(hyperparameters.rounded(rho), hyperparameters.rounded(epsilon)),
        optax.scale_by_learning_rate(rate, flip_sign=False),
        optax.trace(hyperparameters.rounded(momentum)),
        optax.scale(-1.0),
      )
    )

  def direction(grad, rms, mg):
    square = rms if mg is None else rms - jnp.square(mg)
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return grad / (jnp.sqrt(square) + eps)

  def apply_rule(grad, param, slots, step):
    del param
    p = hyperparameters.cast(rho, grad.dtype)
    slots = dict(slots)
    slots["rms"] = p * slots["rms"] + (1 - p) * jnp.square(grad)
    if centered:
      slots["mg"] = p * slots["mg"] + (1 - p) * grad
    update = direction(grad, slots["rms"], slots.get("mg"))
    return -step.learning_rate * update, slots

  def sparse_apply_rule(slices, param, slots, step):
    del param
    p = hyperparameters.cast(rho, slices.dtype)
    grad = slices.values
    sources = {"rms": jnp.square(grad), "mg": grad}
    slots = {
      name: row_wise.decay_and_add(array, p, slices, sources[name])
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


def _adagrad(
  learning_rate=0.001,
  initial_accumulator_value=0.1,
  epsilon=_DEFAULT_EPSILON,
  decay=0.0,
  *,
  frozen,
):
  hyperparameters.check_not_negative(
    initial_accumulator_value=initial_accumulator_value
  )
  epsilon = _epsilon(epsilon)

  def apply_rule(grad, param, slots, step):
    del param
    squares = slots["accumulator"] + jnp.square(grad)
    root = jnp.sqrt(squares) + hyperparameters.cast(epsilon, grad.dtype)
    return -step.learning_rate * grad / root, {"accumulator": squares}

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots={"accumulator": initial_accumulator_value},
    sum_duplicates=True,
  )


def _adam(
  learning_rate=0.001,
  beta_1=0.9,
  beta_2=0.999,
  epsilon=_DEFAULT_EPSILON,
  amsgrad=False,
  decay=0.0,
  *,
  frozen,
):
  epsilon = _epsilon(epsilon)

  def rule(grad, step, moments, slots):
    m, v = moments
    new = {"m": m, "v": v}
    if amsgrad:
      new["vhat"] = jnp.maximum(slots["vhat"], v)
    wide, t = _time(grad.dtype, step, frozen)
    rate = jnp.asarray(step.learning_rate, wide)
    rate = rate * jnp.sqrt(1 - _power(beta_2, t)) / (1 - _power(beta_1, t))
    root = jnp.sqrt(new.get("vhat", v))
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return -(m * rate.astype(grad.dtype)) / (root + eps), new

  def apply_rule(grad, param, slots, step):
    del param
    b1 = hyperparameters.cast(beta_1, grad.dtype)
    b2 = hyperparameters.cast(beta_2, grad.dtype)
    m = slots["m"] + (grad - slots["m"]) * (1 - b1)
    v = slots["v"] + (jnp.square(grad) - slots["v"]) * (1 - b2)
    return rule(grad, step, (m, v), slots)

  def sparse_apply_rule(slices, param, slots, step):
    del param
    b1 = hyperparameters.cast(beta_1, slices.dtype)
    b2 = hyperparameters.cast(beta_2, slices.dtype)
    grad = slices.values
    m = row_wise.decay_and_add(slots["m"], b1, slices, grad)
    v = row_wise.decay_and_add(slots["v"], b2, slices, jnp.square(grad))
    return rule(grad, step, (m, v), slots)

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots=dict.fromkeys(("m", "v", "vhat") if amsgrad else ("m", "v"), 0.0),
    sparse_apply_rule=sparse_apply_rule,
    sum_duplicates=True,
  )


def _nadam(
  learning_rate=0.001,
  beta_1=0.9,
  beta_2=0.999,
  epsilon=_DEFAULT_EPSILON,
  schedule_decay=0.004,
  *,
  frozen,
):
  epsilon = _epsilon(epsilon)

  def momentum(dtype, t):
    """Momentum of step t."""
    exponent = hyperparameters.rounded(schedule_decay) * t
    base = jnp.asarray(0.96, dtype)
    return jnp.asarray(beta_1, dtype) * (1 - 0.5 * base**exponent)

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
    m = b1 * slots["m"] + (1 - b1) * grad
    v = b2 * slots["v"] + (1 - b2) * jnp.square(grad)
    return direction(grad, m, v, step), {"m": m, "v": v}

  def sparse_apply_rule(slices, param, slots, step):
    del param
    b1 = hyperparameters.cast(beta_1, slices.dtype)
    b2 = hyperparameters.cast(beta_2, slices.dtype)
    grad = slices.values
    m = row_wise.decay_and_add(slots["m"], b1, slices, grad)
    v = row_wise.decay_and_add(slots["v"], b2, slices, jnp.square(grad))
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


def _adamax(
  learning_rate=0.001,
  beta_1=0.9,
  beta_2=0.999,
  epsilon=_DEFAULT_EPSILON,
  decay=0.0,
  *,
  frozen,
):
  epsilon = _epsilon(epsilon)

  def apply_rule(grad, param, slots, step):
    del param
    b1 = hyperparameters.cast(beta_1, grad.dtype)
    b2 = hyperparameters.cast(beta_2, grad.dtype)
    m = slots["m"] + (grad - slots["m"]) * (1 - b1)
    v = jnp.maximum(b2 * slots["v"], jnp.abs(grad))
    wide, t = _time(grad.dtype, step, frozen)
    rate = jnp.asarray(step.learning_rate, wide) / (1 - _power(beta_1, t))
    eps = hyperparameters.cast(epsilon, grad.dtype)
    return -rate.astype(grad.dtype) * (m / (v + eps)), {"m": m, "v": v}

  return leaf_rule.base_custom(
    apply_rule,
    _decayed(learning_rate, decay, frozen),
    slots={"m": 0.0, "v": 0.0},
    sum_duplicates=True,
  )


_MAKERS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
  "SGD": _sgd,
  "RMSprop": _rmsprop,
  "Adagrad": _adagrad,
  "Adam": _adam,
  "Nadam": _nadam,
  "Adamax": _adamax,
}


def _check_momentum(momentum):
  hyperparameters.check(
    "momentum", momentum, lambda x: 0 <= x <= 1, "between 0 and 1"
  )


def _epsilon(epsilon):
  """Keras takes the epsilon by ``epsilon or default``."""
  if epsilon is None or (hyperparameters.is_static(epsilon) and epsilon == 0):
    return _DEFAULT_EPSILON
  return epsilon


def _decayed(learning_rate, decay, frozen):
  """The learning rate with Keras's time-inverse decay."""
  if frozen or (hyperparameters.is_static(decay) and decay == 0):
    return hyperparameters.rounded(learning_rate)

  def schedule(count):
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    time = count.astype(jnp.float32)
    return rate / (1 + hyperparameters.rounded(decay) * time)

  return schedule


def _time(dtype, step, frozen):
  """The step from 1, in the dtype that scalars are computed in, and that."""
  wide = hyperparameters.wide_dtype(dtype)
  if frozen:
    return wide, jnp.ones([], wide)
  return wide, (step.count + 1).astype(wide)


def _power(base, exponent):
  return hyperparameters.cast(base, exponent.dtype) ** exponent
