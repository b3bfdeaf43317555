"""Tests of Adam as in TensorFlow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import optimizers


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
