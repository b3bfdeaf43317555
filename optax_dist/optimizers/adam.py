"""Adam as in TensorFlow and in RETURNN, Nadam, and AMSGrad."""

import jax.numpy as jnp
import optax

from optax_dist._internal import checks, step_count
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
  moments,
)
from optax_dist.sparse import rows


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
  return moments.adam(
    learning_rate,
    beta1,
    beta2,
    epsilon,
    _powers_so_far,
    scalars=_powers(beta1, beta2),
  )


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
    squares = complex_numbers.abs_square(grad)
    m = moments.average(slots["m"], beta1, grad, grad)
    v = moments.average(slots["v"], beta2, grad, squares)
    powers = _powers_so_far(step, hyperparameters.wide_dtype(grad.dtype))
    rate = moments.corrected_rate(step, grad.dtype, powers)
    eps = hyperparameters.cast(epsilon, grad.dtype)
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

  return moments.adam(
    learning_rate,
    beta1,
    beta2,
    epsilon,
    _powers_so_far,
    scalars=_powers(beta1, beta2),
    look_ahead=look_ahead,
  )


def amsgrad(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  decay: bool = False,
  beta1: hyperparameters.Scalar = 0.9,
  beta2: hyperparameters.Scalar = 0.99,
  epsilon: hyperparameters.Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""AMSGrad without bias correction.

  .. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad
    v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
    \hat v \leftarrow \max(\hat v, v) \\
    w &\leftarrow w - \eta m / (\sqrt{\hat v} + \epsilon)

  with :math:`\eta / \sqrt t` instead of :math:`\eta` if ``decay``. This is
  ``optax.amsgrad`` without its bias corrections. Note the default epsilon: an
  element whose gradients were all exactly 0 becomes NaN permanently, as in the
  original. RETURNN's configurations use 1e-16.

  The original has no rule for sparse gradients; here it is applied to the
  touched rows (lazy).

  Args:
    learning_rate: A number, a scalar array or a schedule.
    decay: Whether to divide the learning rate by the root of the step, from 1.
    beta1: Decay of the mean.
    beta2: Decay of the mean square.
    epsilon: Added to the root.

  Returns:
    The transformation. Its slots are ``m``, ``v`` and ``v_hat``, from 0.

  Source: ``returnn.tf.updater.AMSGradOptimizer``; Reddi et al., `On the
  Convergence of Adam and Beyond <https://openreview.net/forum?id=ryQu7f-RZ>`_,
  2018.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = amsgrad(0.5, beta1=0.5, beta2=0.75)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> optimizer.update(jnp.full(1, 2.0), state)[0].tolist()
    [-0.5]
  """
  checks.flag("decay", decay)
  hyperparameters.check_numbers(beta1=beta1, beta2=beta2, epsilon=epsilon)
  rate = hyperparameters.checked_rate(learning_rate)
  if decay:
    rate = hyperparameters.divided(rate, lambda count: jnp.sqrt(count + 1))
  # Unlike TensorFlow's optimizers, RETURNN's class computes 1 - beta in Python,
  # so the betas are not rounded to float32 first.
  optimizer = optax.amsgrad(
    rate,
    hyperparameters.adopting(beta1),
    hyperparameters.adopting(beta2),
    hyperparameters.rounded(epsilon),
    bias_correction_mu=False,
    bias_correction_nu=False,
  )
  return step_count.counted(rows.row_wise(optimizer))


def _powers(beta1, beta2):
  return {
    "beta1_power": leaf_rule.power(beta1),
    "beta2_power": leaf_rule.power(beta2),
  }


def _powers_so_far(step, dtype):
  """The powers of both decays, in the dtype for scalars."""
  names = "beta1_power", "beta2_power"
  return tuple(step.scalars[name].astype(dtype) for name in names)
