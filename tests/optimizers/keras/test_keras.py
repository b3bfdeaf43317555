"""Tests of the legacy Keras optimizers, against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.optimizers.keras import KERAS_NAMES, keras_arguments
from optax_dist.sparse import indexed_slices
from optax_dist.sparse.indexed_slices import IndexedSlices
from optax_dist.states import slots

_GRADS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
_START = np.array([1.0, -2.0, 0.5, 3.0], np.float32)


def _trajectory(optimizer, grads=_GRADS):
  @jax.jit
  def run(params, grads):
    def step(carry, grad):
      params, state = carry
      updates, state = optimizer.update(grad, state, params)
      params = indexed_slices.apply_updates(params, updates)
      return (params, state), params

    return jax.lax.scan(step, (params, optimizer.init(params)), grads)[1]

  return run(_START, grads)


def _sgd(w, g, s, t, rate):
  s["b"] = 0.9 * s.get("b", 0) - rate * g
  return w + s["b"]


def _rmsprop(w, g, s, t, rate):
  s["rms"] = 0.8 * s.get("rms", 0) + 0.2 * g**2
  s["mg"] = 0.8 * s.get("mg", 0) + 0.2 * g
  return w - rate * g / (np.sqrt(s["rms"] - s["mg"] ** 2) + 1e-3)


def _adamax(w, g, s, t, rate):
  s["m"] = 0.8 * s.get("m", 0) + 0.2 * g
  s["v"] = np.maximum(0.9 * s.get("v", 0), np.abs(g))
  return w - rate / (1 - 0.8**t) * s["m"] / (s["v"] + 1e-7)


def _adam(w, g, s, t, rate):
  s["m"] = 0.8 * s.get("m", 0) + 0.2 * g
  s["v"] = 0.9 * s.get("v", 0) + 0.1 * g**2
  rate *= np.sqrt(1 - 0.9**t) / (1 - 0.8**t)
  return w - rate * s["m"] / (np.sqrt(s["v"]) + 1e-7)


_CASES = {
  "SGD": (_sgd, {"momentum": 0.9}),
  "RMSprop": (_rmsprop, {"rho": 0.8, "epsilon": 1e-3, "centered": True}),
  "Adamax": (_adamax, {"beta_1": 0.8, "beta_2": 0.9}),
  "Adam": (_adam, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0}),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", _CASES)
def test_formula_with_decay(name, frozen):
  formula, arguments = _CASES[name]
  optimizer = optimizers.keras(
    name.lower(),
    learning_rate=0.1,
    decay=0.5,
    frozen_iterations=frozen,
    **arguments,
  )
  got = _trajectory(optimizer)
  w, memory = np.float64(_START), {}
  for i, grad in enumerate(np.float64(_GRADS)):
    t = 1 if frozen else i + 1
    w = formula(w, grad, memory, t, 0.1 / (1 + 0.5 * (t - 1)))
    np.testing.assert_allclose(got[i], w, rtol=2e-5, atol=1e-6)


def test_a_schedule_goes_on_where_iterations_are_frozen():
  rates = jnp.array([1.0, 0.5, 0.25])
  optimizer = optimizers.keras(
    "SGD", learning_rate=lambda t: rates[t], frozen_iterations=True, decay=9.0
  )
  got = _trajectory(optimizer, np.ones((3, 4), np.float32))
  np.testing.assert_allclose(got[-1], _START - 1.75, rtol=1e-6)


def test_nadam_schedules_its_momentum():
  slow = optimizers.keras("Nadam", learning_rate=0.1, schedule_decay=0.004)
  fast = optimizers.keras("Nadam", learning_rate=0.1, schedule_decay=4.0)
  first, second = _trajectory(slow), _trajectory(fast)
  assert np.abs(first - second).max() > 1e-3


def test_sgd_without_momentum_adds_repeated_rows():
  optimizer = optimizers.keras("SGD", learning_rate=1.0)
  slices = IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 1]), (3, 1))
  state = optimizer.init(jnp.zeros((3, 1)))
  updates, _ = optimizer.update(slices, state)
  assert updates.to_dense()[:, 0].tolist() == [0.0, -2.0, 0.0]


def test_rmsprop_with_momentum_is_lazy_without_it_decays():
  params = jnp.ones((3, 1))
  slices = IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (3, 1))
  for momentum, untouched in ((0.5, 1.0), (0.0, 0.9)):
    optimizer = optimizers.keras(
      "RMSprop", momentum=momentum, centered=True, learning_rate=0.1
    )
    state = optimizer.init(params)
    _, state = optimizer.update(jnp.ones((3, 1)), state, params)
    before = slots.get_slot(state, "", "rms")
    updates, state = optimizer.update(slices, state, params)
    np.testing.assert_allclose(
      slots.get_slot(state, "", "rms")[0], untouched * before[0], rtol=1e-6
    )
    assert updates.indices.tolist() == [1]


def test_errors():
  with pytest.raises(ValueError, match="one of SGD, RMSprop, Adagrad, Adam"):
    optimizers.keras("Adadelta2")
  with pytest.raises(ValueError, match=r"among learning_rate.*got rho"):
    optimizers.keras("Adam", rho=0.9)
  with pytest.raises(ValueError, match="momentum must be between 0 and 1"):
    optimizers.keras("SGD", momentum=1.5)
  with pytest.raises(ValueError, match="initial_accumulator_value"):
    optimizers.keras("Adagrad", initial_accumulator_value=-1.0)


@pytest.mark.parametrize("name", KERAS_NAMES)
def test_arguments(name):
  known = keras_arguments(name)
  assert known[0] == "learning_rate"
  assert "frozen" not in known
