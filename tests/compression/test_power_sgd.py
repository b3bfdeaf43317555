"""Low rank: exact where it must be, the paper's equations elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import compression


def _updates(method, gradients):
  """The results of one replica for each of a list of stacked gradients."""

  def run(*gradients):
    state = method.init(gradients[0])
    out = []
    for gradient in gradients:
      result, state = method.reduce(gradient, state, ("data",))
      out.append(result)
    return out, state

  out, state = jax.jit(jax.vmap(run, axis_name="data"))(*gradients)
  return [leaf[0] for leaf in out], state


def _normal(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


def test_low_rank_mean_is_exact_at_once():
  left, right = _normal(12, 2), _normal(2, 10, seed=1)
  noise = _normal(3, 12, 10, seed=2)
  noise -= jnp.mean(noise, 0, keepdims=True)  # Cancels between the replicas.
  gradients = (left @ right)[None] + noise
  (result,), _ = _updates(
    compression.power_sgd(2, error_feedback=None), [gradients]
  )
  np.testing.assert_allclose(result, left @ right, atol=1e-4)


def test_repeated_updates_find_the_best_approximation():
  """Warm start makes it power iteration: that of the singular vectors."""
  matrix = _normal(20, 15)
  u, s, v = np.linalg.svd(matrix)
  s = np.concatenate([[10.0, 8.0], s[2:] * 0.1])
  matrix = jnp.asarray((u[:, : len(s)] * s) @ v[: len(s)], jnp.float32)
  best = (u[:, :2] * s[:2]) @ v[:2]
  gradients = [jnp.stack([matrix] * 2)] * 12
  results, _ = _updates(
    compression.power_sgd(2, error_feedback=None), gradients
  )
  assert np.linalg.norm(results[-1] - best) < 0.02 * np.linalg.norm(best)


def test_power_sgd_follows_its_paper():
  """Algorithms 1 and 2: P = M Q, orthogonal; Q = M' P; the error is kept."""
  gradients = [_normal(3, 8, 6, seed=i) for i in range(3)]
  method = compression.power_sgd(1)
  results, state = _updates(method, gradients)
  q = np.asarray(method.init(gradients[0][0]).shared[0])
  errors = np.zeros((3, 8, 6))
  for gradient, result in zip(gradients, results, strict=True):
    m = np.asarray(gradient) + errors
    p = np.mean(m @ q, 0)
    p /= np.linalg.norm(p)
    own = np.swapaxes(m, 1, 2) @ p
    q = np.mean(own, 0)
    np.testing.assert_allclose(result, p @ q.T, rtol=1e-3, atol=1e-4)
    errors = m - p @ np.swapaxes(own, 1, 2)
  np.testing.assert_allclose(state.residual, errors, rtol=1e-3, atol=1e-4)


def test_vectors_and_small_matrices_are_sent_whole():
  gradients = {"b": _normal(2, 9), "w": _normal(2, 3, 2, seed=1)}
  method = compression.power_sgd(2)
  (result,), state = (
    lambda pair: ([jax.tree.map(lambda x: x[0], pair[0][0])], pair[1])
  )(
    jax.vmap(
      lambda g: (lambda r: ([r[0]], r[1]))(
        method.reduce(g, method.init(g), ("data",))
      ),
      axis_name="data",
    )(gradients)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, np.mean(b, 0), rtol=1e-6),
    result,
    gradients,
  )
  # Without factors: one number, so that the structure is the same for shards.
  assert [x.shape for x in jax.tree.leaves(state.shared)] == [(2, 1, 1)]
  assert method.sent(jax.tree.map(lambda x: x[0], gradients)) == 4 * 15


def test_size_is_that_of_the_factors():
  method = compression.power_sgd(4)
  assert method.sent(jnp.zeros((100, 20, 10))) == 4 * 4 * (100 + 200)


def test_leaves_of_more_axes_keep_their_shape():
  gradients = _normal(2, 6, 4, 5)
  (result,), _ = _updates(compression.power_sgd(1), [gradients])
  assert result.shape == (6, 4, 5)


@pytest.mark.parametrize("first", [0.0, np.nan])
def test_power_sgd_recovers_from_a_zero_gradient(first):
  """A factor of zeros would stay so if the first rows of gradients are zero."""
  matrix = (_normal(12, 2) @ _normal(2, 10, seed=1)).at[:3].set(0.0)
  gradients = [jnp.full((1, 12, 10), first), *[matrix[None]] * 2]
  results, _ = _updates(compression.power_sgd(2), gradients)
  np.testing.assert_allclose(results[-1], matrix, atol=1e-4)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_tiny_and_huge_gradients_are_approximated_as_well(size):
  """The product of a gradient and the last one would be 0 or infinite."""
  matrix = (_normal(12, 2) @ _normal(2, 10, seed=1)).at[:3].set(0.0)
  gradients = [size * matrix[None]] * 3
  results, _ = _updates(compression.power_sgd(2), gradients)
  np.testing.assert_allclose(results[-1] / size, matrix, atol=1e-3)
