"""Tests of learning rates: arrays and schedules, for leaves of any dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.optimizers._internal import hyperparameters

_DTYPES = ("float16", "bfloat16", "float32")
_MAKERS = {
  "adadelta": optimizers.adadelta,
  "adagrad": optimizers.adagrad,
  "adam": optimizers.adam,
  "amsgrad": lambda rate: optimizers.amsgrad(rate, epsilon=0.5),
  "amsgrad decay": lambda rate: optimizers.amsgrad(rate, True, epsilon=0.5),
  "gradient_descent": optimizers.gradient_descent,
  "keras sgd": lambda rate: optimizers.keras("SGD", learning_rate=rate),
  "keras sgd momentum": lambda rate: optimizers.keras(
    "SGD", learning_rate=rate, momentum=0.5, nesterov=True, decay=0.5
  ),
  "keras rmsprop": lambda rate: optimizers.keras(
    "RMSprop", learning_rate=rate, momentum=0.5
  ),
  "momentum": lambda rate: optimizers.momentum(rate, 0.5),
  "rmsprop": lambda rate: optimizers.rmsprop(rate, momentum=0.5),
}


def _two_updates(optimizer, params):
  """Updates of two steps, and the state between them and after them."""
  state = optimizer.init(params)
  results = []
  for _ in range(2):
    updates, state = optimizer.update(params, state, params)
    results.append((updates, state))
  return results


@pytest.mark.parametrize("name", _MAKERS)
def test_an_array_is_as_a_number_for_leaves_of_mixed_dtypes(name):
  params = {dtype: jnp.array([0.5, -2.0], dtype) for dtype in _DTYPES}
  want = _two_updates(_MAKERS[name](0.25), params)
  got = _two_updates(_MAKERS[name](jnp.float32(0.25)), params)
  for (got_updates, got_state), (want_updates, _) in zip(
    got, want, strict=True
  ):
    for dtype in _DTYPES:
      assert got_updates[dtype].dtype == dtype
      np.testing.assert_allclose(
        np.float32(got_updates[dtype]),
        np.float32(want_updates[dtype]),
        rtol=2e-6 if dtype == "float32" else 1e-2,
      )
    kinds = [jax.tree.map(lambda x: x.dtype, s) for s in (got_state, got[0][1])]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", ["amsgrad decay", "keras sgd momentum"])
@pytest.mark.parametrize(
  "rate", [np.float64(0.25), np.float32(0.25), lambda t: jnp.float64(0.25)]
)
def test_a_divided_rate_may_be_of_another_dtype(name, rate):
  with jax.enable_x64(True):
    params = {dtype: jnp.ones(2, dtype) for dtype in ("float32", "float64")}
    want = _two_updates(_MAKERS[name](0.25), params)[1][0]
    got = _two_updates(_MAKERS[name](rate), params)[1][0]
    for dtype in params:
      assert got[dtype].dtype == dtype
      np.testing.assert_allclose(got[dtype], want[dtype], rtol=1e-6)


def test_divided_counts_from_zero():
  schedule = hyperparameters.divided(lambda count: 2.0**count, lambda t: 1 + t)
  got = [float(schedule(jnp.int32(count))) for count in range(3)]
  np.testing.assert_allclose(got, [1.0, 1.0, 4 / 3], rtol=1e-6)
