"""Adagrad, its dual averaging form, and Adadelta."""

import jax.numpy as jnp
import optax

from optax_dist._internal import step_count
from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  leaf_rule,
)
from optax_dist.sparse import rows


def adagrad(
  learning_rate: hyperparameters.ScalarOrSchedule,
  initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
  r"""Adagrad, without an epsilon.

  .. math::
    a \leftarrow a + g^2, \quad w \leftarrow w - \eta g / \sqrt{a}

  This is ``optax.adagrad`` with ``eps=0`` (optax adds 1e-7 inside the root).
  With a sparse gradient it is lazy, which is equivalent to the dense rule.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    initial_accumulator_value: Initial value of the accumulator, > 0.

  Returns:
    The transformation. Its slot is ``accumulator``.

  Raises:
    ValueError: If ``initial_accumulator_value`` is not positive.

  Source: ``tf.compat.v1.train.AdagradOptimizer``; Duchi et al., `Adaptive
  Subgradient Methods <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = adagrad(0.5, initial_accumulator_value=1.0)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> updates = optimizer.update(jnp.full(1, 3.0**0.5), state)[0]
    >>> [f"{x:.4f}" for x in updates]
    ['-0.4330']
  """
  hyperparameters.check_positive(
    initial_accumulator_value=initial_accumulator_value
  )
  optimizer = optax.adagrad(
    hyperparameters.checked_rate(learning_rate),
    hyperparameters.rounded(initial_accumulator_value),
    eps=0.0,
  )
  return step_count.counted(rows.row_wise(optimizer))


def adagrad_da(
  learning_rate: hyperparameters.ScalarOrSchedule,
  initial_gradient_squared_accumulator_value: float = 0.1,
  l1_regularization_strength: hyperparameters.Scalar = 0.0,
  l2_regularization_strength: hyperparameters.Scalar = 0.0,
  *,
  global_step_start: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Adagrad with dual averaging: the parameter is a function of all gradients.

  .. math::
    s &\leftarrow s + g, \quad a \leftarrow a + g^2 \\
    w &\leftarrow -\eta\,
      \frac{\operatorname{sign}(s) \max(|s| - \lambda_1 T, 0)}
           {\sqrt{a} + \lambda_2 T \eta}

  with the step :math:`T`, from 1. The parameter's initial value is forgotten in
  the first step. With a sparse gradient only the touched rows are recomputed,
  with the current :math:`T`.

  The original takes the global step as an argument. Here it is
  ``global_step_start`` plus the number of updates so far, unless ``update``
  gets a ``global_step=`` argument: TensorFlow's global step before this update
  (so :math:`T` is one more).

  Args:
    learning_rate: A number, a scalar array or a schedule.
    initial_gradient_squared_accumulator_value: Initial value of :math:`a`, > 0.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.
    global_step_start: Global step of the first update.

  Returns:
    The transformation. Its slots are ``gradient_accumulator``, from 0, and
    ``gradient_squared_accumulator``. ``update`` needs the parameters.

  Raises:
    ValueError: If ``initial_gradient_squared_accumulator_value`` is not
      positive.

  Source: ``tf.compat.v1.train.AdagradDAOptimizer``; Duchi et al., `Adaptive
  Subgradient Methods <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = adagrad_da(0.5, initial_gradient_squared_accumulator_value=3.)
    >>> params = jnp.full(1, 7.0)
    >>> updates, _ = optimizer.update(jnp.ones(1), optimizer.init(params), params)
    >>> (params + updates).tolist()
    [-0.25]
  """
  hyperparameters.check_numbers(
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
    global_step_start=global_step_start,
  )
  hyperparameters.check_positive(
    initial_gradient_squared_accumulator_value=(
      initial_gradient_squared_accumulator_value
    )
  )
  with_l1 = not (
    hyperparameters.is_static(l1_regularization_strength)
    and l1_regularization_strength == 0
  )

  def apply_rule(grad, param, slots, step):
    dtype, rate = grad.dtype, step.learning_rate
    l1 = hyperparameters.cast(l1_regularization_strength, dtype)
    l2 = hyperparameters.cast(l2_regularization_strength, dtype)
    before = step.extra_args.get("global_step")
    if before is None:
      before = global_step_start + step.count
    time = (jnp.asarray(before) + 1).astype(dtype)
    total = slots["gradient_accumulator"] + grad
    squares = slots["gradient_squared_accumulator"] + jnp.square(grad)
    kept = total
    if with_l1:
      kept = jnp.sign(total) * jnp.maximum(jnp.abs(total) - l1 * time, 0)
    new = -rate * kept / (l2 * time * rate + jnp.sqrt(squares))
    slots = {
      "gradient_accumulator": total,
      "gradient_squared_accumulator": squares,
    }
    return new - param, slots

  optimizer = leaf_rule.base_custom(
    apply_rule,
    learning_rate,
    slots={
      "gradient_accumulator": 0.0,
      "gradient_squared_accumulator": (
        initial_gradient_squared_accumulator_value
      ),
    },
    sum_duplicates=True,
    needs_params=True,
  )
  return complex_numbers.real_only("adagrad_da", optimizer)


def adadelta(
  learning_rate: hyperparameters.ScalarOrSchedule = 0.001,
  rho: hyperparameters.Scalar = 0.95,
  epsilon: hyperparameters.Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Adadelta.

  .. math::
    a &\leftarrow \rho a + (1 - \rho) g^2 \\
    d &= g \sqrt{u + \epsilon} / \sqrt{a + \epsilon} \\
    u &\leftarrow \rho u + (1 - \rho) d^2, \quad w \leftarrow w - \eta d

  This is ``optax.scale_by_adadelta``, with other defaults. With a sparse
  gradient it is lazy: the averages of untouched rows do not decay.

  Args:
    learning_rate: A number, a scalar array or a schedule. The paper uses 1.
    rho: Decay of the averages.
    epsilon: Added inside both roots.

  Returns:
    The transformation. Its slots are ``accum``, :math:`a`, and
    ``accum_update``, :math:`u`; both start at 0.

  Source: ``tf.compat.v1.train.AdadeltaOptimizer``; Zeiler, `ADADELTA
  <https://arxiv.org/abs/1212.5701>`_, 2012.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = adadelta(1.0, rho=0.75, epsilon=0.25)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> updates = optimizer.update(jnp.full(1, 3.0**0.5), state)[0]
    >>> [f"{x:.4f}" for x in updates]
    ['-0.8660']
  """
  hyperparameters.check_numbers(rho=rho, epsilon=epsilon)
  optimizer = rows.row_wise(
    # Not optax.adadelta itself, since it adds a weight decay of 0 times the parameters.
    optax.chain(
      optax.scale_by_adadelta(
        hyperparameters.rounded(rho), hyperparameters.rounded(epsilon)
      ),
      optax.scale_by_learning_rate(hyperparameters.checked_rate(learning_rate)),
    )
  )
  return step_count.counted(complex_numbers.real_only("adadelta", optimizer))
