"""Tests of Adagrad, its dual averaging form and Adadelta."""

import functools

import float64_runs
import jax.numpy as jnp
import numpy as np
import pairwise
import pytest

from optax_dist import optimizers

every_rate = pytest.mark.parametrize("rate", float64_runs.RATES)


@every_rate
def test_adagrad_is_its_formula(rate):
  def formula(w, g, s, t, rate):
    s["a"] = s["a"] + g**2
    return w - rate * g / np.sqrt(s["a"])

  make = functools.partial(optimizers.adagrad, initial_accumulator_value=0.0625)
  float64_runs.check(make, formula, {"a": 0.0625}, rate=rate, sparse="lazy")


@pairwise.every_pair(
  rate=list(float64_runs.RATES), l1=[0.0, 0.125], l2=[0.0, 0.5]
)
def test_adagrad_da_is_its_formula(rate, l1, l2):
  def formula(w, g, s, t, rate):
    s["s"] = s["s"] + g
    s["a"] = s["a"] + g**2
    kept = np.sign(s["s"]) * np.maximum(np.abs(s["s"]) - l1 * (t + 3), 0)
    return -rate * kept / (np.sqrt(s["a"]) + l2 * (t + 3) * rate)

  make = functools.partial(
    optimizers.adagrad_da,
    initial_gradient_squared_accumulator_value=0.0625,
    l1_regularization_strength=l1,
    l2_regularization_strength=l2,
    global_step_start=3,
  )
  slots = {"s": 0.0, "a": 0.0625}
  float64_runs.check(make, formula, slots, rate=rate, sparse="lazy")


@every_rate
def test_adadelta_is_its_formula(rate):
  def formula(w, g, s, t, rate):
    s["a"] = 0.75 * s["a"] + 0.25 * g**2
    d = g * np.sqrt(s["u"] + 2.0**-10) / np.sqrt(s["a"] + 2.0**-10)
    s["u"] = 0.75 * s["u"] + 0.25 * d**2
    return w - rate * d

  make = functools.partial(optimizers.adadelta, rho=0.75, epsilon=2.0**-10)
  slots = {"a": 0.0, "u": 0.0}
  float64_runs.check(make, formula, slots, rate=rate, sparse="lazy")


def test_adagrad_da_takes_the_global_step():
  arguments = {"l2_regularization_strength": 0.5}
  late = optimizers.adagrad_da(0.1, global_step_start=7, **arguments)
  given = optimizers.adagrad_da(0.1, **arguments)
  params = jnp.ones(2)
  want, _ = late.update(params, late.init(params), params)
  got, _ = given.update(params, given.init(params), params, global_step=7)
  assert got.tolist() == want.tolist()
  other, _ = given.update(params, given.init(params), params)
  assert other.tolist() != want.tolist()


def test_adagrad_da_forgets_where_it_started():
  """Even without a gradient: the parameter is a function of all gradients."""
  params = jnp.array([7.0, -0.3, 1e4])
  optimizer = optimizers.adagrad_da(0.5)
  grads = jnp.array([0.0, 0.0, 0.3])
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  want = [0.0, 0.0, -0.5 * 0.3 / np.sqrt(0.1 + 0.3**2)]
  np.testing.assert_allclose(params + updates, want, atol=2e-3)
  assert not (params + updates)[:2].any()


@pytest.mark.parametrize("strength", [0.0, 0.05])
def test_an_l1_strength_that_is_traced_counts_even_if_it_is_zero(strength):
  params, grads = jnp.array([1.0, -1.0]), jnp.array([0.3, 0.2])
  make = functools.partial(optimizers.adagrad_da, 0.1)
  plain = make(l1_regularization_strength=strength)
  traced = make(l1_regularization_strength=jnp.float32(strength))
  want, _ = plain.update(grads, plain.init(params), params)
  got, _ = traced.update(grads, traced.init(params), params)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_errors():
  with pytest.raises(ValueError, match="must be positive, got 0"):
    optimizers.adagrad(1.0, 0.0)
  with pytest.raises(ValueError, match="must be positive, got -1"):
    optimizers.adagrad_da(1.0, -1.0)
  optimizer = optimizers.adagrad_da(0.1)
  params = jnp.ones(2)
  with pytest.raises(ValueError, match="reads the parameters"):
    optimizer.update(params, optimizer.init(params))
