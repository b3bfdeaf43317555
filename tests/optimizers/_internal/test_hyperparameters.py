"""Tests of hyper-parameters in float32."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.optimizers._internal import hyperparameters


@hypothesis.given(st.floats(2.0**-20, 1.0))
def test_one_minus_a_rounded_number_is_that_of_float32(beta):
  want = np.float32(1) - np.float32(beta)
  assert np.float32(1 - hyperparameters.rounded(beta)) == want


def test_schedules_stay_and_arrays_keep_their_value():
  array = jnp.float32(0.1)
  schedule = lambda count: 0.1
  assert hyperparameters.rounded(schedule) is schedule
  assert hyperparameters.rounded(array) == array
  assert hyperparameters.cast(array, jnp.bfloat16).dtype == jnp.bfloat16
  assert hyperparameters.cast(0.1, jnp.bfloat16) == float(np.float32(0.1))


# All of their hyperparameters but the learning rate.
_MAKERS = {
  "adadelta": functools.partial(optimizers.adadelta, rho=0.75, epsilon=0.125),
  "adagrad": functools.partial(
    optimizers.adagrad, initial_accumulator_value=0.5
  ),
  "adagrad_da": functools.partial(
    optimizers.adagrad_da,
    initial_gradient_squared_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    global_step_start=2,
  ),
  "adam": functools.partial(
    optimizers.adam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "amsgrad": functools.partial(
    optimizers.amsgrad, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "custom_adam": functools.partial(
    optimizers.custom_adam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "ftrl": functools.partial(
    optimizers.ftrl,
    learning_rate_power=-0.75,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    l2_shrinkage_regularization_strength=0.5,
    beta=0.25,
  ),
  "grad_variance_scaled": functools.partial(
    optimizers.grad_variance_scaled, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "keras adagrad": functools.partial(
    optimizers.keras, "Adagrad", initial_accumulator_value=0.5, epsilon=0.125
  ),
  "keras adam": functools.partial(
    optimizers.keras, "Adam", beta_1=0.75, beta_2=0.5, epsilon=0.125
  ),
  "keras adamax": functools.partial(
    optimizers.keras, "Adamax", beta_1=0.75, beta_2=0.5, epsilon=0.125
  ),
  "keras nadam": functools.partial(
    optimizers.keras,
    "Nadam",
    beta_1=0.75,
    beta_2=0.5,
    epsilon=0.125,
    schedule_decay=0.5,
  ),
  "keras rmsprop": functools.partial(
    optimizers.keras, "RMSprop", rho=0.75, epsilon=0.125
  ),
  "keras rmsprop momentum": functools.partial(
    optimizers.keras, "RMSprop", rho=0.75, epsilon=0.125, momentum=0.5
  ),
  "keras sgd": functools.partial(
    optimizers.keras, "SGD", momentum=0.5, decay=0.5
  ),
  "momentum": functools.partial(optimizers.momentum, momentum=0.5),
  "nadam": functools.partial(
    optimizers.nadam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "neural_optimizer1": functools.partial(
    optimizers.neural_optimizer1, beta1=0.75, decrease_factor=0.25
  ),
  "proximal_adagrad": functools.partial(
    optimizers.proximal_adagrad,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
  ),
  "proximal_gradient_descent": functools.partial(
    optimizers.proximal_gradient_descent,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
  ),
  "rmsprop": functools.partial(
    optimizers.rmsprop, decay=0.75, momentum=0.5, epsilon=0.125
  ),
}


@pytest.mark.parametrize("name", _MAKERS)
def test_traced_numbers_are_as_plain_ones_for_leaves_of_mixed_dtypes(name):
  """As `optax.inject_hyperparams` gives them: float32, whatever the leaf is."""
  make = functools.partial(_MAKERS[name], learning_rate=0.25)
  numbers = make.keywords
  grads = {
    dtype: jnp.array([0.5, -2.0], dtype) for dtype in ("bfloat16", "float32")
  }

  def two_updates(optimizer):
    state = optimizer.init(grads)
    updates, new = optimizer.update(grads, state, grads)
    kinds = [
      jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (new, state)
    ]
    assert kinds[0] == kinds[1]
    return [updates, optimizer.update(grads, new, grads)[0]]

  kind = lambda x: np.int32 if isinstance(x, int) else np.float32
  both = jax.jit(lambda n: (two_updates(make(**n)), two_updates(make())))
  traced, plain = both({key: kind(x)(x) for key, x in numbers.items()})
  for got, want in zip(traced, plain, strict=True):
    for dtype, rtol in (("float32", 1e-5), ("bfloat16", 2e-2)):
      assert got[dtype].dtype == dtype
      np.testing.assert_allclose(
        np.float32(got[dtype]), np.float32(want[dtype]), rtol=rtol
      )


def test_scalars_are_wide():
  assert hyperparameters.wide_dtype(jnp.dtype("bfloat16")) == jnp.float32
  assert hyperparameters.wide_dtype(jnp.dtype("float64")) == jnp.float64


def test_checks_name_the_argument_and_the_value():
  with pytest.raises(ValueError, match="x must be positive, got 0"):
    hyperparameters.check_positive(x=0)
  with pytest.raises(
    ValueError, match=r"y must be positive or zero, got -1\.5"
  ):
    hyperparameters.check_not_negative(x=0, y=-1.5)
  with pytest.raises(ValueError, match=r"finite number.*got nan"):
    hyperparameters.check_positive(x=float("nan"))
  hyperparameters.check_positive(x=jnp.float32(-1.0))  # Not a plain number.
