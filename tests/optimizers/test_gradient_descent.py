"""Tests of normalized gradient descent."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers


def test_tiny_gradient_is_not_scaled_to_a_whole_step():
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
