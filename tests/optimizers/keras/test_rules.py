"""Tests of the rules of the legacy Keras optimizers, against their formulas."""

import functools

import float64_runs
import jax.numpy as jnp
import numpy as np
import pairwise
import pytest

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices
from optax_dist.states import slots

_EPSILON = 2.0**-10
_BETAS = {"beta_1": 0.75, "beta_2": 0.875, "epsilon": _EPSILON}
_DECAY = 0.5


def _sgd(w, g, s, t, rate, nesterov=False):
  s["b"] = 0.75 * s["b"] - rate * g
  return w + (0.75 * s["b"] - rate * g if nesterov else s["b"])


def _averages(g, s):
  s["rms"] = 0.875 * s["rms"] + 0.125 * g**2
  s["mg"] = 0.875 * s["mg"] + 0.125 * g


def _rmsprop(w, g, s, t, rate, centered=False):
  _averages(g, s)
  variance = s["rms"] - centered * s["mg"] ** 2
  return w - rate * g / (np.sqrt(variance) + _EPSILON)


def _rmsprop_with_momentum(w, g, s, t, rate, centered=False):
  """TensorFlow's kernel, with the epsilon inside of the root."""
  _averages(g, s)
  variance = s["rms"] - centered * s["mg"] ** 2
  s["b"] = 0.75 * s["b"] + rate * g / np.sqrt(variance + _EPSILON)
  return w - s["b"]


def _adagrad(w, g, s, t, rate):
  s["a"] = s["a"] + g**2
  return w - rate * g / (np.sqrt(s["a"]) + _EPSILON)


def _adam(w, g, s, t, rate, amsgrad=False):
  s["m"] = 0.75 * s["m"] + 0.25 * g
  s["v"] = 0.875 * s["v"] + 0.125 * g**2
  s["vhat"] = np.maximum(s["vhat"], s["v"])
  rate = rate * np.sqrt(1 - 0.875**t) / (1 - 0.75**t)
  root = np.sqrt(s["vhat"] if amsgrad else s["v"])
  return w - rate * s["m"] / (root + _EPSILON)


def _adamax(w, g, s, t, rate):
  s["m"] = 0.75 * s["m"] + 0.25 * g
  s["v"] = np.maximum(0.875 * s["v"], np.abs(g))
  return w - rate / (1 - 0.75**t) * s["m"] / (s["v"] + _EPSILON)


def _nadam(w, g, s, t, rate):
  s["m"] = 0.75 * s["m"] + 0.25 * g
  s["v"] = 0.875 * s["v"] + 0.125 * g**2
  now, after = (0.75 * (1 - 0.5 * 0.96 ** (0.5 * i)) for i in (t, t + 1))
  s["product"] = s["product"] * now
  ahead = (1 - now) * g / (1 - s["product"])
  ahead = ahead + after * s["m"] / (1 - s["product"] * after)
  return w - rate * ahead / (np.sqrt(s["v"] / (1 - 0.875**t)) + _EPSILON)


_RMS = {"rms": 0.0, "mg": 0.0, "b": 0.0}
_ADAM = {"m": 0.0, "v": 0.0, "vhat": 0.0}
_RMSPROP = {"rho": 0.875, "epsilon": _EPSILON}
#: Class, arguments, formula, slots, and what a sparse gradient changes.
_CASES = {
  "sgd": ("SGD", {}, lambda w, g, s, t, rate: w - rate * g, {}, "lazy"),
  "momentum": ("SGD", {"momentum": 0.75}, _sgd, {"b": 0.0}, "lazy"),
  "nesterov": (
    "SGD",
    {"momentum": 0.75, "nesterov": True},
    functools.partial(_sgd, nesterov=True),
    {"b": 0.0},
    "lazy",
  ),
  "rmsprop": ("RMSprop", _RMSPROP, _rmsprop, _RMS, "moves"),
  "rmsprop centered": (
    "RMSprop",
    {**_RMSPROP, "centered": True},
    functools.partial(_rmsprop, centered=True),
    _RMS,
    "moves",
  ),
  "rmsprop with momentum": (
    "RMSprop",
    {**_RMSPROP, "momentum": 0.75, "centered": True},
    functools.partial(_rmsprop_with_momentum, centered=True),
    _RMS,
    "lazy",
  ),
  "adagrad": (
    "Adagrad",
    {"initial_accumulator_value": 0.0625, "epsilon": _EPSILON},
    _adagrad,
    {"a": 0.0625},
    "lazy",
  ),
  "adam": ("Adam", _BETAS, _adam, _ADAM, "dense"),
  "amsgrad": (
    "Adam",
    {**_BETAS, "amsgrad": True},
    functools.partial(_adam, amsgrad=True),
    _ADAM,
    "dense",
  ),
  "adamax": ("Adamax", _BETAS, _adamax, {"m": 0.0, "v": 0.0}, "lazy"),
  "nadam": (
    "Nadam",
    {**_BETAS, "schedule_decay": 0.5},
    _nadam,
    {"m": 0.0, "v": 0.0, "product": 1.0},
    "moves",
  ),
}


@pairwise.every_value(frozen=[False, True], case=list(_CASES))
def test_rule_follows_its_formula(case, frozen):
  """With decay; where iterations are frozen, only a schedule goes on."""
  rate = "schedule" if frozen else "number"
  name, arguments, rule, start, sparse = _CASES[case]
  decay = {} if name == "Nadam" else {"decay": _DECAY}

  def formula(w, g, s, t, rate):
    t = 1 if frozen else t
    return rule(w, g, s, t, rate / (1 + decay.get("decay", 0.0) * (t - 1)))

  def make(learning_rate):
    return optimizers.keras(
      name,
      learning_rate=learning_rate,
      frozen_iterations=frozen,
      **arguments,
      **decay,
    )

  # Nadam keeps the product of its momenta as float32.
  rtol = 1e-6 if name == "Nadam" else 1e-11
  float64_runs.check(make, formula, start, rate=rate, sparse=sparse, rtol=rtol)


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


@pytest.mark.parametrize("epsilon", [0, 0.0, None])
def test_omitted_epsilon_is_the_default(epsilon):
  optimizer = optimizers.keras(
    "Adagrad",
    learning_rate=1.0,
    initial_accumulator_value=0.0,
    epsilon=epsilon,
  )
  grads = jnp.array([0.0, 1e-7])
  updates, _ = optimizer.update(grads, optimizer.init(grads))
  np.testing.assert_allclose(updates, [0.0, -0.5], rtol=1e-5)
