"""Every method over replicas: the same numbers under each map, as by hand."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pairwise
import pytest
from compressing import received

from optax_dist import compression

METHODS = {
  "top_k": compression.top_k(0.2, chunk=16, error_feedback=0.9),
  "top_k 2 bits": compression.top_k(0.2, chunk=16, bits=2, error_feedback=1.0),
  "quantize 4": compression.quantize(4, block=16),
  "quantize 2 stochastic": compression.quantize(
    2, stochastic=True, error_feedback=None
  ),
  "sign": compression.sign(),
  "sign with feedback": compression.sign(error_feedback=1.0),
  "power_sgd": compression.power_sgd(1),
}
SIZE = 4
# One of each kind.
KINDS = ["top_k", "quantize 4", "sign with feedback", "power_sgd"]


@functools.cache
def _gradients():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=(SIZE, *shape)).astype(np.float32)
  return [{"b": normal(5), "w": normal(6, 8)} for _ in range(3)]


def _updates(method, *gradients):
  """The results of updates, and what is left over after each of them."""
  state = method.init(gradients[0])
  results, residuals = [], []
  for gradient in gradients:
    result, state = method.reduce(gradient, state, (maps.AXIS,))
    results.append(result)
    residuals.append(state.residual)
  return results, residuals


@functools.cache
def _reference(name):
  fn = functools.partial(_updates, METHODS[name])
  return jax.jit(jax.vmap(fn, axis_name=maps.AXIS))(*_gradients())


@pairwise.every_value(
  map_name=maps.NAMES, name=["top_k", "sign with feedback", "power_sgd"]
)
def test_the_numbers_are_the_same_under_each_map(map_name, name):
  fn = functools.partial(_updates, METHODS[name])
  got = maps.run(map_name, fn, *_gradients()[:2], size=SIZE)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
    got,
    tuple(result[:2] for result in _reference(name)),
  )


@pytest.mark.parametrize("name", METHODS)
def test_the_result_is_equal_on_all_replicas(name):
  results, _ = _reference(name)
  for leaf in jax.tree.leaves(results):
    np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * SIZE))


@pytest.mark.parametrize("name", ["top_k", "top_k 2 bits", "quantize 4"])
def test_sent_values_are_averaged_and_the_residual_is_kept(name):
  """Residual' = u - sent, u = gradient + decay * residual; sent is averaged."""
  method = METHODS[name]
  decay = 0.9 if name == "top_k" else 1.0
  left = [
    jax.tree.map(lambda x: np.zeros_like(x[0]), _gradients()[0])
    for _ in range(SIZE)
  ]
  results, (*_, residual) = _reference(name)
  for gradient, result in zip(_gradients(), results, strict=True):
    sent = []
    for i in range(SIZE):
      u = jax.tree.map(lambda g, e, i=i: g[i] + decay * e, gradient, left[i])
      sent.append(jax.tree.map(lambda x: np.asarray(received(method, x)), u))
      left[i] = jax.tree.map(lambda a, b: a - b, u, sent[i])
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *sent)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-5),
      result,
      mean,
    )
  for i in range(SIZE):
    jax.tree.map(
      lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=1e-5),
      residual,
      left[i],
    )


def test_error_feedback_sends_everything_eventually():
  """A constant gradient arrives in full over many updates."""
  gradient = jnp.asarray(np.random.default_rng(5).normal(size=(SIZE, 64)))
  gradient = gradient.astype(jnp.float32)
  method = compression.top_k(0.1)

  def many(gradient):
    def update(state, _):
      result, state = method.reduce(gradient, state, (maps.AXIS,))
      return state, result

    _, results = jax.lax.scan(update, method.init(gradient), length=200)
    return jnp.mean(results, axis=0)

  got = jax.jit(jax.vmap(many, axis_name=maps.AXIS))(gradient)[0]
  expected = np.mean(gradient, axis=0)
  error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
  assert error < 0.1
  forgetful = compression.top_k(0.1, error_feedback=None)
  lost = jax.vmap(
    lambda g: forgetful.reduce(g, forgetful.init(g), (maps.AXIS,))[0],
    axis_name=maps.AXIS,
  )(gradient)[0]
  assert np.linalg.norm(lost - expected) / np.linalg.norm(expected) > 0.3


def test_all_leaves_travel_in_one_message():
  for name, most in (("top_k", 1), ("sign", 1), ("power_sgd", 4)):
    fn = functools.partial(_updates, METHODS[name])
    run = maps.mapped("shard_map", fn, _gradients(), SIZE)
    text = str(jax.make_jaxpr(run)(*_gradients()))
    count = text.count("all_gather[") + text.count("psum[")
    assert 3 <= count <= 3 * most, (name, count)


@pairwise.every_value(bad=[np.nan, np.inf], name=KINDS)
def test_nonfinite_gradient_does_not_spoil_later_ones(name, bad):
  first, *later = _gradients()
  first = jax.tree.map(np.copy, first)
  first["b"][1, 0] = first["w"][1, 2, 3] = bad
  fn = functools.partial(_updates, METHODS[name])
  run = jax.jit(jax.vmap(fn, axis_name=maps.AXIS))
  (_, *results), (*_, residual) = run(first, *later)
  for leaf in jax.tree.leaves((results, residual)):
    assert np.isfinite(leaf).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_leaf_without_a_gradient_is_left_alone(name):
  """Parameters that are integers, keys or frozen have None as their update."""
  first, second, third = _gradients()
  frozen = {"b": None, "w": second["w"]}
  fn = functools.partial(_updates, METHODS[name])
  run = jax.jit(jax.vmap(fn, axis_name=maps.AXIS))
  (_, result, _), _ = run(first, frozen, third)
  assert result["b"] is None
  expected = _reference(name)[0][1]["w"]
  np.testing.assert_allclose(result["w"], expected, rtol=2e-5, atol=2e-5)


def _one_update(method, gradient):
  return method.reduce(gradient, method.init(gradient), (maps.AXIS,))[0]


@pytest.mark.parametrize("name", KINDS)
def test_empty_updates_are_accepted(name):
  gradient = jnp.zeros((SIZE, 0, 3))
  fn = functools.partial(_one_update, METHODS[name])
  run = jax.jit(jax.vmap(fn, axis_name=maps.AXIS))
  assert run(gradient).shape == gradient.shape
