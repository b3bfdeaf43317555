"""elastic_average against theory, on a quadratic loss with a noisy gradient.

The gradient is ``h * x - sigma * noise``; one parameter of 1024 elements serves as
1024 independent chains.
"""

import functools

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.states import state_axes
from optax_dist.states.center import center_params
from optax_dist.transforms.elastic_average import elastic_average

CHAINS = 1024


@functools.partial(
  jax.jit,
  static_argnames=("tx", "p", "exchanges", "tau", "chains"),
  compiler_options=compiling.OPTIMIZED,
)
def _run(tx, p, eta, beta, h, sigma, exchanges, tau, start=0.0, chains=CHAINS):
  """Trains; returns the center and the replicas after each exchange, as moments.

  ``tx`` is a function of the rates, so that programs are shared.
  """
  tx = tx(eta, beta)
  params = jnp.full((p, chains), start)
  state = tx.init(params[0])
  axes = state_axes(state)
  update = jax.vmap(
    tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="replicas"
  )

  def step(carry, key):
    params, state = carry
    noise = jax.random.normal(key, params.shape)
    updates, state = update(h * params - sigma * noise, state, params)
    return (params + updates, state), None

  def exchange(carry, key):
    (params, state), _ = jax.lax.scan(step, carry, jax.random.split(key, tau))
    center = center_params(state)
    spread = params - params.mean(0, keepdims=True)
    return (params, state), (
      jnp.mean(center**2),
      jnp.mean(spread**2),
      jnp.mean(jnp.abs(params)) + jnp.mean(jnp.abs(center)),
    )

  keys = jax.random.split(jax.random.key(7), exchanges)
  return jax.lax.scan(exchange, (params, state), keys)[1]


@functools.cache
def _transform(p, tau):
  """The paper's synchronous form: gradient and pull from the same point."""
  return lambda eta, beta: elastic_average(
    optax.sgd(eta),
    "replicas",
    num_replicas=p,
    communication_period=tau,
    moving_rate=beta / p,
    exchange="same_point",
  )


def _stationary(p, eta, h, beta, sigma, tau, burn_in, exchanges):
  center, spread, _ = _run(
    _transform(p, tau), p, eta, beta, h, sigma, burn_in + exchanges, tau
  )
  return float(center[burn_in:].mean()), float(spread[burn_in:].mean())


def _terms(p, eta, h, beta):
  """alpha, a and c2."""
  alpha = beta / p
  return alpha, eta * h + alpha + beta, eta * h * beta


@pytest.mark.parametrize(
  ("p", "eta", "h", "beta", "sigma"),
  [
    (4, 0.1, 1.0, 0.9, 1.0),
    (8, 0.5, 0.6, 1.2, 0.3),
  ],
)
def test_stationary_variances_match_theory(p, eta, h, beta, sigma):
  alpha, a, c2 = _terms(p, eta, h, beta)
  center, spread = _stationary(p, eta, h, beta, sigma, 1, 100, 300)
  expected = beta * eta * sigma**2 / (p * h)
  expected *= (2 - a + c2) / ((a - c2) * (4 - 2 * a + c2))
  np.testing.assert_allclose(center, expected, rtol=0.04)
  expected = eta**2 * sigma**2 * (1 - 1 / p) / (1 - (1 - eta * h - alpha) ** 2)
  np.testing.assert_allclose(spread, expected, rtol=0.04, atol=1e-9)


@pytest.mark.parametrize(
  ("p", "tau", "value"),
  [(4, 4, 0.0107772), (8, 10, 0.00562)],
)
def test_stationary_variance_matches_theory_at_any_period(p, tau, value):
  eta, h, beta, sigma = 0.1, 1.0, 0.9, 1.0
  alpha = beta / p
  r = 1 - eta * h
  d = r ** (tau - 1)
  s = d * (r - alpha) + 1 - beta
  q = d * ((r - alpha) * (1 - beta) - alpha * beta)
  noise = eta**2 * sigma**2 / p * sum(r ** (2 * k) for k in range(tau))
  expected = beta**2 * noise * (1 + q) / ((1 - q) * ((1 + q) ** 2 - s**2))
  np.testing.assert_allclose(expected, value, rtol=1e-5)
  center, _ = _stationary(p, eta, h, beta, sigma, tau, 60, 200)
  np.testing.assert_allclose(center, expected, rtol=0.04)


def _is_stable(p, eta, h, beta):
  size = _run(_transform(p, 1), p, eta, beta, h, 0.0, 400, 1, 1.0, 1)[2]
  assert not 0.5 < size[-1] < 2, "too close to the border to tell"
  return bool(size[-1] < 1)


def _is_stable_in_theory(p, eta, h, beta):
  _, a, c2 = _terms(p, eta, h, beta)
  return eta * h > 0 and beta > 0 and a > c2 and 4 - 2 * a + c2 > 0


@pytest.mark.parametrize("side", [0.97, 1.03])
def test_stability_border_matches_theory(side):
  """Where 4 - 2a + c2 changes its sign, in beta and in eta."""
  p, eta, h = 4, 0.1, 2.0
  beta = side * (4 - 2 * eta * h) / (2 * (1 + 1 / p) - eta * h)
  assert _is_stable_in_theory(p, eta, h, beta) == (side < 1)
  assert _is_stable(p, eta, h, beta) == (side < 1)
  beta = 0.6
  eta = side * (4 - 2 * beta * (1 + 1 / p)) / (2 - beta) / h
  assert _is_stable_in_theory(p, eta, h, beta) == (side < 1)
  assert _is_stable(p, eta, h, beta) == (side < 1)


@pytest.mark.parametrize(
  ("p", "eta", "h", "beta", "stable"),
  [
    (4, 0.1, 0.5, 0.9, True),
    (4, 0.1, -0.5, 0.9, False),  # eta * h > 0 does not hold,
    (4, 1.0, 4.0, 4.0, False),  # nor here a > c2, though 4 - 2a + c2 > 0.
  ],
)
def test_other_stability_conditions_match_theory(p, eta, h, beta, stable):
  assert _is_stable_in_theory(p, eta, h, beta) == stable
  assert _is_stable(p, eta, h, beta) == stable


def test_center_stays_without_a_force():
  """The condition beta > 0 does not hold."""
  size = _run(_transform(4, 1), 4, 0.1, 0.0, 0.5, 0.0, 400, 1, 1.0, 1)[2]
  np.testing.assert_allclose(size[-1], 1.0, atol=1e-6)  # Of the center alone.
