"""Tests of single rules beyond the recordings of the originals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.sparse import indexed_slices
from optax_dist.sparse.indexed_slices import IndexedSlices


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: optimizers.adagrad(1.0, 0.0), "must be positive, got 0"),
    (lambda: optimizers.adagrad_da(1.0, -1.0), "must be positive, got -1"),
    (lambda: optimizers.proximal_adagrad(1.0, 0), "must be positive, got 0"),
    (lambda: optimizers.ftrl(1.0, 0.5), "learning_rate_power must be negative"),
    (
      lambda: optimizers.ftrl(1.0, initial_accumulator_value=-0.1),
      "initial_accumulator_value must be positive or zero",
    ),
    (
      lambda: optimizers.ftrl(1.0, l1_regularization_strength=-0.1),
      "l1_regularization_strength must be positive or zero",
    ),
    (
      lambda: optimizers.ftrl(1.0, l2_regularization_strength=-0.1),
      "l2_regularization_strength must be positive or zero",
    ),
    (
      lambda: optimizers.ftrl(1.0, l2_shrinkage_regularization_strength=-1),
      "l2_shrinkage_regularization_strength must be positive or zero",
    ),
  ],
)
def test_validation(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize(
  "make",
  [
    optimizers.adagrad_da,
    optimizers.ftrl,
    optimizers.proximal_adagrad,
    optimizers.proximal_gradient_descent,
  ],
)
def test_rules_that_read_the_parameters_say_so(make):
  optimizer = make(0.1)
  params = jnp.ones(2)
  with pytest.raises(ValueError, match="reads the parameters"):
    optimizer.update(params, optimizer.init(params))


def test_adagrad_da_takes_the_global_step():
  arguments = {"l2_regularization_strength": 0.5}
  late = optimizers.adagrad_da(0.1, global_step_start=7, **arguments)
  given = optimizers.adagrad_da(0.1, **arguments)
  params = jnp.ones(2)
  want, _ = late.update(params, late.init(params), params)
  got, _ = given.update(params, given.init(params), params, global_step=7)
  assert got.tolist() == want.tolist()
  other, _ = given.update(params, given.init(params), params)
  assert other.tolist() != want.tolist()


def test_a_coefficient_that_is_traced_counts_even_if_it_is_zero():
  params, grads = jnp.array([1.0, -1.0]), jnp.array([0.3, 0.2])
  for make in (
    optimizers.adagrad_da,
    optimizers.ftrl,
    optimizers.proximal_adagrad,
    optimizers.proximal_gradient_descent,
  ):
    for strength in (0.0, 0.05):
      plain = make(0.1, l1_regularization_strength=strength)
      traced = make(0.1, l1_regularization_strength=jnp.float32(strength))
      want, _ = plain.update(grads, plain.init(params), params)
      got, _ = traced.update(grads, traced.init(params), params)
      np.testing.assert_allclose(got, want, rtol=1e-6)


def test_amsgrad_with_epsilon_zero_is_nan_without_gradients():
  optimizer = optimizers.amsgrad()
  params = jnp.ones(2)
  updates, _ = optimizer.update(
    jnp.array([0.0, 1.0]), optimizer.init(params), params
  )
  assert np.isnan(updates).tolist() == [True, False]


def test_adam_epsilon_is_outside_of_the_bias_correction():
  grads = jnp.array([1e-3])
  own, stock = optimizers.adam(1.0, epsilon=1e-2), optax.adam(1.0, eps=1e-2)
  got, _ = own.update(grads, own.init(grads))
  np.testing.assert_allclose(
    got, -np.sqrt(1e-3) * 1e-3 / (np.sqrt(1e-3) * 1e-3 + 1e-2), rtol=1e-4
  )
  with jax.numpy_dtype_promotion("standard"):  # Stock Adam mixes dtypes.
    other, _ = stock.update(grads, stock.init(grads))
  assert abs(got[0]) < 0.1 * abs(other[0])


def test_rules_of_repeated_rows_one_by_one():
  """Against the originals' formulas: each repetition has its own factor."""
  values, start = np.array([[3.0], [-1.0], [2.0]]), np.zeros((3, 1))
  slices = IndexedSlices(values.astype(np.float32), np.array([1, 1, 0]), (3, 1))
  m = start.copy()
  np.add.at(m, [1, 1, 0], 0.1 * values)
  of_m = m[np.array([1, 1, 0])]

  want = start.copy()
  agrees = np.sign(values) == np.sign(of_m)
  np.add.at(want, [1, 1, 0], -values * np.where(agrees, 1.0, 0.1))
  optimizer = optimizers.neural_optimizer1(1.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)

  deviation = (values - of_m) ** 2
  v = start.copy()
  np.add.at(v, [1, 1, 0], 0.5 * deviation)
  factor = np.minimum(v[np.array([1, 1, 0])] / deviation, 1.0)
  want = start.copy()
  np.add.at(want, [1, 1, 0], -values * factor)
  optimizer = optimizers.grad_variance_scaled(1.0, beta2=0.5, epsilon=0.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)

  optimizer = optimizers.normalized_sgd(1.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  want = start.copy()
  np.add.at(want, [1, 1, 0], -values / np.sqrt(14.0))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)


def test_new_values_of_zero_are_exact():
  """Rules that compute the new value give its difference: exact at zero."""
  params = jnp.array([0.1, -1e4, 1e-20, 3.0])
  optimizer = optimizers.proximal_gradient_descent(1.0, 1e5)
  updates, _ = optimizer.update(jnp.zeros(4), optimizer.init(params), params)
  assert not indexed_slices.apply_updates(params, updates).any()
