"""Tests of RETURNN's NeuralOptimizer1."""

import functools

import float64_runs
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.sparse.indexed_slices import IndexedSlices


@pytest.mark.parametrize("rate", float64_runs.RATES)
def test_it_is_its_formula(rate):
  def formula(w, g, s, t, rate):
    s["m"] = 0.75 * s["m"] + 0.25 * g
    return w - rate * g * np.where(np.sign(g) == np.sign(s["m"]), 1.0, 0.125)

  make = functools.partial(
    optimizers.neural_optimizer1, beta1=0.75, decrease_factor=0.125
  )
  float64_runs.check(make, formula, {"m": 0.0}, rate=rate, sparse=None)


def test_an_average_of_zero_has_the_sign_of_no_other_gradient():
  optimizer = optimizers.neural_optimizer1(1.0, beta1=0.5, decrease_factor=0.25)
  state = optimizer.init(jnp.zeros(1))
  for grad, want in ((1.0, -1.0), (-0.5, 0.125), (0.0, 0.0)):
    # The second makes the average 0.5 * 0.5 - 0.5 * 0.5.
    updates, state = optimizer.update(jnp.full(1, grad), state)
    assert updates.tolist() == [want]


def test_repeated_rows_compare_their_signs_each():
  values, want = np.array([[3.0], [-1.0], [2.0]]), np.zeros((3, 1))
  slices = IndexedSlices(values.astype(np.float32), np.array([1, 1, 0]), (3, 1))
  m = np.zeros((3, 1))
  np.add.at(m, [1, 1, 0], 0.1 * values)
  agrees = np.sign(values) == np.sign(m[np.array([1, 1, 0])])
  np.add.at(want, [1, 1, 0], -values * np.where(agrees, 1.0, 0.1))
  optimizer = optimizers.neural_optimizer1(1.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)
