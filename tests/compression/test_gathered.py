"""Tests of compression by gathering, with codecs that show what is sent."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist.compression import _bits
from optax_dist.compression._gathered import gathered

N = 3


def _decode(data, n):
  return _bits.bytes_to_floats(data)


#: What encodes and decodes: all as it is, so that the mean is exact.
_EXACT = (lambda x, key: _bits.floats_to_bytes(x), _decode)
#: Sends half of each number.
_HALF = (lambda x, key: _bits.floats_to_bytes(0.5 * x), _decode)
#: Sends random numbers from 0 to 1, whatever it is given.
_RANDOM = (
  lambda x, key: _bits.floats_to_bytes(jax.random.uniform(key, x.shape)),
  _decode,
)


def _updates(method, *gradients):
  """The mean of each update, and the state after them, over N replicas."""

  def run(*gradients):
    state, out = method.init(gradients[0]), []
    for gradient in gradients:
      mean, state = method.reduce(gradient, state, (maps.AXIS,))
      out.append(mean)
    return out, state

  return jax.jit(jax.vmap(run, axis_name=maps.AXIS))(*gradients)


def _normal(seed, *shape):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(N, *shape)).astype(np.float32)


def test_each_leaf_gets_back_its_own_mean():
  """All leaves are in one message: of any shapes, and without elements."""
  gradients = {
    "a": _normal(0, 2, 3),
    "empty": _normal(1, 0, 2),
    "none": None,
    "scalar": _normal(2),
    "z": _normal(3, 5),
  }
  (mean,), state = _updates(gathered("it", *_EXACT, None), gradients)
  assert mean["none"] is None
  for name in ("a", "empty", "scalar", "z"):
    want = np.broadcast_to(gradients[name].mean(0), gradients[name].shape)
    np.testing.assert_allclose(mean[name], want, rtol=1e-6)
  assert state.residual is None
  assert state.num_updates.tolist() == [1] * N


def test_a_leaf_without_gradient_keeps_its_residual():
  gradients = {"x": _normal(0, 4), "y": _normal(1, 2)}
  only_y = {"x": None, "y": gradients["y"]}
  method = gathered("it", *_HALF, 1.0)
  means, state = _updates(method, gradients, only_y)
  assert means[1]["x"] is None
  np.testing.assert_allclose(state.residual["x"], 0.5 * gradients["x"])
  # Half of what is new and of what was left.
  want = 0.75 * gradients["y"]
  np.testing.assert_allclose(state.residual["y"], want, rtol=1e-6)


def test_update_of_none_advances_the_count():
  """Otherwise the next update would draw the same random numbers."""
  gradients = {"x": _normal(0, 4)}
  method = gathered("it", *_HALF, 1.0)
  means, state = _updates(method, gradients, {"x": None})
  assert means[1] == {"x": None}
  assert state.num_updates.tolist() == [2] * N
  np.testing.assert_allclose(state.residual["x"], 0.5 * gradients["x"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_updates_are_rounded_only_in_the_mean(dtype):
  """The residual is added, sent and kept as float32."""
  first, second = (jnp.full((N, 2), x, dtype) for x in (1.0, 4096.0))
  means, state = _updates(gathered("it", *_HALF, 1.0), first, second)
  assert means[1].dtype == dtype
  np.testing.assert_array_equal(np.float32(means[1]), 2048.0)
  np.testing.assert_array_equal(state.residual, np.float32(2048.25))


def test_random_numbers_differ_by_replica_update_and_leaf():
  gradients = {name: np.zeros((N, 3), np.float32) for name in "ab"}
  drawn = []
  for count in (1, 2):
    for seed in (0, 1):
      method = gathered("it", *_RANDOM, 0.0, seed)
      _, state = _updates(method, *[gradients] * count)
      drawn += [-np.asarray(state.residual[name]) for name in "ab"]
  drawn = np.stack(drawn)
  assert ((drawn >= 0) & (drawn < 1)).all()
  assert len(np.unique(drawn)) == drawn.size == 2 * 2 * 2 * N * 3


def test_random_numbers_of_a_leaf_do_not_depend_on_other_leaves():
  zeros = np.zeros((N, 3), np.float32)
  method = gathered("it", *_RANDOM, 0.0)
  _, both = _updates(method, {"a": zeros, "b": zeros})
  _, alone = _updates(method, {"a": None, "b": zeros})
  np.testing.assert_array_equal(both.residual["b"], alone.residual["b"])


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_integer_gradients_are_refused_by_name(dtype):
  gradients = {"x": [jnp.ones((N, 2)), jnp.ones((N, 2), dtype)]}
  method = gathered("it", *_EXACT, None)
  with pytest.raises(
    TypeError, match=rf"compression\.it .*\['x'\]\[1\] is {dtype}"
  ):
    _updates(method, gradients)
