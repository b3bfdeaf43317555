"""Majority vote, as the paper has it."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist import compression


def _reduce(method, gradients):
  fn = lambda g: method.reduce(g, method.init(g), ("data",))
  run = jax.jit(jax.vmap(fn, axis_name="data"))
  return run(jnp.asarray(gradients, jnp.float32))


def test_majority_decides_and_a_tie_is_zero():
  gradients = [
    [5.0, -1.0, 3.0],
    [-1.0, -2.0, -9.0],
    [0.5, -3.0, 1.0],
    [2, 1, -1],
  ]
  result, _ = _reduce(compression.sign(), gradients)
  np.testing.assert_array_equal(result[0], [1.0, -1.0, 0.0])


def test_with_feedback_the_vote_has_the_mean_magnitude():
  gradients = np.array([[1.0, -3.0], [2.0, 2.0], [4.0, -6.0]])
  result, state = _reduce(compression.sign(error_feedback=1.0), gradients)
  np.testing.assert_allclose(result[0], np.array([1, -1]) * 3.0)
  np.testing.assert_allclose(
    state.residual,
    gradients - np.sign(gradients) * np.mean(np.abs(gradients), 1)[:, None],
  )


def test_sign_sends_a_byte_for_five_numbers():
  assert compression.sign().sent(jnp.zeros((10, 8))) == 16
  assert compression.sign(error_feedback=0.5).sent(jnp.zeros((10, 8))) == 20
