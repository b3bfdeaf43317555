"""Tests of AMSGrad as in RETURNN."""

import jax.numpy as jnp
import numpy as np

from optax_dist import optimizers


def test_amsgrad_with_epsilon_zero_is_nan_without_gradients():
  optimizer = optimizers.amsgrad()
  params = jnp.ones(2)
  updates, _ = optimizer.update(
    jnp.array([0.0, 1.0]), optimizer.init(params), params
  )
  assert np.isnan(updates).tolist() == [True, False]
