"""Tests of RETURNN's NeuralOptimizer1."""

import jax.numpy as jnp
import numpy as np

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices


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
