"""Adam as in TensorFlow and in RETURNN, and Nadam."""

import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
  row_wise,
)


def adam(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  beta1: hyperparameters.Scalar = 0.9,
  beta2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Adam, with epsilon outside the bias correction ("epsilon hat").

  .. math::
    \eta_t &= \eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
    m &\leftarrow m + (1 - \beta_1) (g - m), \quad
    v \leftarrow v + (1 - \beta_2) (g^2 - v) \\
    w &\leftarrow w - \eta_t m / (\sqrt v + \epsilon)

  ``optax.adam`` adds epsilon to the corrected root, so its epsilon is this one
  divided by :math:`\sqrt{1 - \beta_2^t}`. Both :math:`1 - \beta` and the powers
  are float32, as in TensorFlow. A sparse gradient is equivalent to a dense one:
  the averages of all rows decay and all rows move, so the update is dense.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the mean.
    beta2: Decay of the mean square.
    epsilon: Added to the root.

  Returns:
    The transformation. Its slots are ``m`` and ``v``, from 0.

  Source: ``tf.compat.v1.train.AdamOptimizer``; Kingma and Ba, `Adam
  <https://arxiv.org/abs/1412.6980>`_, 2014, just before section 2.1.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = adam(0.5)
    >>> state = optimizer.init(jnp.zeros(2))
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.1]), state)
    >>> [f"{x:.3f}" for x in updates]
    ['-0.500', '0.500']
  """
  hyperparameters.check_numbers(beta1=beta1, beta2=beta2, epsilon=epsilon)

  return _with_averages(learning_rate, beta1, beta2, epsilon)


def custom_adam(
  learning_rate: hyperparameters.ScalarOrSchedule,
  beta1: hyperparameters.Scalar = 0.9,
  beta2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""RETURNN's own Adam: :func:`adam`, but lazy on sparse gradients.

  .. math::
    \eta_t &= \eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
    m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad
    v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
    w &\leftarrow w - \eta_t m / (\sqrt v + \epsilon)

  With a sparse gradient only the touched rows and their averages change, and
  the updates are sparse. The original leaves repeated indices undefined (the
  last write wins); here they are summed first.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the mean.
    beta2: Decay of the mean square.
    epsilon: Added to the root.

  Returns:
    The transformation. Its slots are ``m`` and ``v``, from 0.

  Source: ``returnn.tf.updater.CustomAdamOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = custom_adam(0.5)
    >>> state = optimizer.init(jnp.zeros(2))
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.1]), state)
    >>> [f"{x:.3f}" for x in updates]
    ['-0.500', '0.500']
  """
  hyperparameters.check_numbers(beta1=beta1, beta2=beta2, epsilon=epsilon)

  def apply_rule(grad, param, slots, step):
    del param
    b1, b2, eps = (
      hyperparameters.cast(x, grad.dtype) for x in (beta1, beta2, epsilon)
    )
    rest1 = hyperparameters.complement(beta1, grad.dtype)
    rest2 = hyperparameters.complement(beta2, grad.dtype)
    m = b1 * slots["m"] + rest1 * grad
    v = b2 * slots["v"] + rest2 * complex_numbers.abs_square(grad)
    rate = _corrected_rate(step, grad.dtype)
    return -rate * (m / (jnp.sqrt(v) + eps)), {"m": m, "v": v}

  return leaf_rule.base_custom(
    apply_rule,
    learning_rate,
    slots={"m": 0.0, "v": 0.0},
    scalars=_powers(beta1, beta2),
    sum_duplicates=True,
  )


def nadam(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  beta1: hyperparameters.Scalar = 0.9,
  beta2: hyperparameters.Scalar = 0.999,
  epsilon: hyperparameters.Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Adam with Nesterov momentum, in TensorFlow's form.

  .. math::
    \eta_t &= \eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
    m &\leftarrow m + (1 - \beta_1) (g - m), \quad
    v \leftarrow v + (1 - \beta_2) (g^2 - v) \\
    w &\leftarrow w - \eta_t (\beta_1 m + (1 - \beta_1) g)
      / (\sqrt v + \epsilon)

  ``optax.nadam`` corrects the bias of the two terms separately and adds epsilon
  after the correction; Keras's Nadam, ``keras("Nadam")``, schedules the
  momentum. With a sparse gradient the averages of all rows decay, and the
  touched rows move; the updates are sparse.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    beta1: Decay of the mean.
    beta2: Decay of the mean square.
    epsilon: Added to the root.

  Returns:
    The transformation. Its slots are ``m`` and ``v``, from 0.

  Source: ``returnn.tf.updater.NadamOptimizer``, formerly
  ``tf.contrib.opt.NadamOptimizer``; Dozat, `Incorporating Nesterov Momentum
  into Adam <https://cs229.stanford.edu/proj2015/054_report.pdf>`_, 2015.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = nadam(0.5)
    >>> state = optimizer.init(jnp.zeros(2))
    >>> updates, _ = optimizer.update(jnp.array([3.0, -0.1]), state)
    >>> [f"{x:.3f}" for x in updates]
    ['-0.950', '0.950']
  """
  hyperparameters.check_numbers(beta1=beta1, beta2=beta2, epsilon=epsilon)

  def look_ahead(grad, m):
    rest1 = hyperparameters.complement(beta1, grad.dtype)
    return grad * rest1 + hyperparameters.cast(beta1, grad.dtype) * m

  return _with_averages(learning_rate, beta1, beta2, epsilon, look_ahead)


def _with_averages(learning_rate, beta1, beta2, epsilon, look_ahead=None):
  """Adam, or Nadam, whose steps go along ``look_ahead(gradient, mean)``."""

  def apply_rule(grad, param, slots, step):
    del param
    eps = hyperparameters.cast(epsilon, grad.dtype)
    m, v = moments.averages(slots, grad, beta1, beta2)
    ahead = look_ahead(grad, m) if look_ahead else m
    rate = _corrected_rate(step, grad.dtype)
    return -(ahead * rate) / (jnp.sqrt(v) + eps), {"m": m, "v": v}

  def sparse_apply_rule(slices, param, slots, step):
    del param
    eps = hyperparameters.cast(epsilon, slices.dtype)
    m, v = slots_after = moments.sparse_averages(slots, slices, beta1, beta2)
    if look_ahead:  # Only touched rows move.
      m, v = (row_wise.read_rows(x, slices) for x in slots_after)
      m = look_ahead(slices.values, m)
    update = -_corrected_rate(step, slices.dtype) * m / (jnp.sqrt(v) + eps)
    if look_ahead:
      update = row_wise.like_gradient(update, slices)
    return update, dict(zip("mv", slots_after, strict=True))

  return leaf_rule.base_custom(
    apply_rule,
    learning_rate,
    slots={"m": 0.0, "v": 0.0},
    scalars=_powers(beta1, beta2),
    sparse_apply_rule=sparse_apply_rule,
    sum_duplicates=True,
  )


def _powers(beta1, beta2):
  return {
    "beta1_power": leaf_rule.power(beta1),
    "beta2_power": leaf_rule.power(beta2),
  }


def _corrected_rate(step, dtype):
  """The learning rate with Adam's bias corrections, in the leaf's dtype."""
  wide = hyperparameters.wide_dtype(dtype)
  beta1_power = step.scalars["beta1_power"].astype(wide)
  beta2_power = step.scalars["beta2_power"].astype(wide)
  rate = hyperparameters.in_wide_dtype(step.learning_rate, dtype)
  rate = rate * jnp.sqrt(1 - beta2_power) / (1 - beta1_power)
  return rate.astype(dtype)
