"""Tests of RETURNN's GradVarianceScaled."""

import jax.numpy as jnp
import numpy as np

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices


def test_repeated_rows_have_a_deviation_each():
  values, start = np.array([[3.0], [-1.0], [2.0]]), np.zeros((3, 1))
  slices = IndexedSlices(values.astype(np.float32), np.array([1, 1, 0]), (3, 1))
  m, v, want = start.copy(), start.copy(), start.copy()
  np.add.at(m, [1, 1, 0], 0.1 * values)
  deviation = (values - m[np.array([1, 1, 0])]) ** 2
  np.add.at(v, [1, 1, 0], 0.5 * deviation)
  factor = np.minimum(v[np.array([1, 1, 0])] / deviation, 1.0)
  np.add.at(want, [1, 1, 0], -values * factor)
  optimizer = optimizers.grad_variance_scaled(1.0, beta2=0.5, epsilon=0.0)
  updates, _ = optimizer.update(slices, optimizer.init(jnp.zeros((3, 1))))
  np.testing.assert_allclose(updates.to_dense(), want, rtol=1e-5)
