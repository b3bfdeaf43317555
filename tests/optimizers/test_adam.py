"""Tests of Adam as in TensorFlow and in RETURNN, and of Nadam."""

import functools

import float64_runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers

_ARGUMENTS = {"beta1": 0.75, "beta2": 0.875, "epsilon": 2.0**-10}


def _averages(g, s):
  s["m"] = 0.75 * s["m"] + 0.25 * g
  s["v"] = 0.875 * s["v"] + 0.125 * g**2


def _corrected(rate, t):
  return rate * np.sqrt(1 - 0.875**t) / (1 - 0.75**t)


def _adam(w, g, s, t, rate):
  _averages(g, s)
  return w - _corrected(rate, t) * s["m"] / (np.sqrt(s["v"]) + 2.0**-10)


def _nadam(w, g, s, t, rate):
  _averages(g, s)
  ahead = 0.75 * s["m"] + 0.25 * g
  return w - _corrected(rate, t) * ahead / (np.sqrt(s["v"]) + 2.0**-10)


@pytest.mark.parametrize("rate", float64_runs.RATES)
@pytest.mark.parametrize(
  ("optimizer", "formula", "sparse"),
  [
    (optimizers.adam, _adam, "dense"),
    (optimizers.custom_adam, _adam, "lazy"),
    (optimizers.nadam, _nadam, "moves"),
  ],
)
def test_it_is_its_formula(optimizer, formula, sparse, rate):
  float64_runs.check(
    functools.partial(optimizer, **_ARGUMENTS),
    formula,
    {"m": 0.0, "v": 0.0},
    rate=rate,
    sparse=sparse,
  )


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
