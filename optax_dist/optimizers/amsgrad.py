"""AMSGrad as in RETURNN."""

import jax.numpy as jnp
import optax

from optax_dist._internal import checks
from optax_dist.optimizers._internal import hyperparameters, rates, row_wise


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
  rate = learning_rate
  if decay:
    rate = rates.divided(learning_rate, lambda count: jnp.sqrt(count + 1))
  # Unlike TensorFlow's optimizers, RETURNN's class computes 1 - beta in Python,
  # so the betas are not rounded to float32 first.
  return row_wise.row_wise(
    rates.with_learning_rate(
      lambda rate: optax.amsgrad(
        rate,
        hyperparameters.adopting(beta1),
        hyperparameters.adopting(beta2),
        hyperparameters.rounded(epsilon),
        bias_correction_mu=False,
        bias_correction_nu=False,
      ),
      rate,
    )
  )
