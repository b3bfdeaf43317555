"""Tests of gradient descent, plain and normalized."""

import float64_runs
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.sparse.indexed_slices import IndexedSlices

_PLAIN = [optimizers.gradient_descent, optimizers.custom_gradient_descent]


@pytest.mark.parametrize("rate", float64_runs.RATES)
@pytest.mark.parametrize("make", _PLAIN)
def test_it_is_its_formula(make, rate):
  formula = lambda w, g, s, t, rate: w - rate * g
  float64_runs.check(make, formula, rate=rate, sparse="lazy")


@pytest.mark.parametrize("rate", float64_runs.RATES)
def test_normalized_sgd_is_its_formula(rate):
  def formula(w, g, s, t, rate):
    return w - rate * g / np.sqrt(max(np.sum(g**2), 1e-12))

  float64_runs.check(optimizers.normalized_sgd, formula, rate=rate, sparse=None)


def test_a_tiny_gradient_is_not_blown_up_to_a_whole_step():
  """Below a norm of 1e-6 the step shrinks with the gradient, down to zero."""
  optimizer = optimizers.normalized_sgd(1.0)
  for size, want in ((3e-6, -1.0), (1e-7, -0.1), (1e-9, -1e-3), (0.0, 0.0)):
    grads = jnp.array([0.6 * size, 0.8 * size])
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    np.testing.assert_allclose(updates, [0.6 * want, 0.8 * want], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gradient_of_zeros_moves_nothing(dtype):
  grad = jnp.zeros(3, dtype)
  optimizer = optimizers.normalized_sgd(1.0)
  updates, _ = optimizer.update(grad, optimizer.init(grad))
  assert updates.dtype == dtype
  np.testing.assert_array_equal(updates, np.zeros(3))


def test_large_half_precision_gradients_are_normalized():
  """Their squares do not fit."""
  grad = jnp.array([3e3, 4e3], jnp.float16)
  optimizer = optimizers.normalized_sgd(1.0)
  updates, _ = optimizer.update(grad, optimizer.init(grad))
  np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-3)


def test_repeated_rows_count_each_in_the_norm():
  values = np.array([[3.0], [-1.0], [2.0]], np.float32)
  slices = IndexedSlices(values, np.array([1, 1, 0]), (3, 1))
  optimizer = optimizers.normalized_sgd(1.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  want = np.zeros((3, 1))
  np.add.at(want, [1, 1, 0], -values / np.sqrt(14.0))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)
