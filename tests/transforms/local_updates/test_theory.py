"""local_updates against theory, on quadratic losses without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.states import state_axes
from optax_dist.states.center import center_params
from optax_dist.transforms.local_updates import local_updates
from optax_dist.transforms.presets import local_sgd

ETA = 0.1


@functools.partial(jax.jit, static_argnames=("tx", "rounds", "period"))
def _run(tx, curvatures, optima, rounds, period, start=0.0, rate=1.0):
  """Trains; returns the center after each round, and the mean at each step."""
  tx = tx(rate)
  params = jnp.full(curvatures.shape, start)
  state = tx.init(params[0])
  axes = state_axes(state)
  update = jax.vmap(
    tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="i"
  )

  def step(carry, _):
    params, state = carry
    gradients = curvatures * (params - optima)
    updates, state = update(gradients, state, params)
    params = params + updates
    return (params, state), params.mean()

  def one_round(carry, _):
    carry, means = jax.lax.scan(step, carry, length=period)
    return carry, (center_params(carry[1]), means)

  centers, means = jax.lax.scan(one_round, (params, state), length=rounds)[1]
  return centers, means.ravel()


@pytest.mark.parametrize(
  ("period", "value"), [(1, 0.75), (10, 0.5987), (100, 0.5)]
)
def test_fixed_points_match_theory_if_curvatures_differ(period, value):
  """Long rounds forget the curvatures: the mean of optima, not of losses."""
  h, b = jnp.array([1.0, 3.0]), jnp.array([0.0, 1.0])
  weights = 1 - (1 - ETA * np.asarray(h)) ** period
  expected = (weights * np.asarray(b)).sum() / weights.sum()
  np.testing.assert_allclose(expected, value, atol=5e-5)
  for start in (-2.0, 0.7):
    centers, _ = _run(_local_sgd(period), h, b, 200, period, start)
    np.testing.assert_allclose(centers[-1], expected, rtol=1e-5)


@functools.cache
def _local_sgd(period):
  return lambda rate: local_sgd(
    optax.sgd(ETA), "i", communication_period=period, num_replicas=2
  )


@pytest.mark.parametrize("period", [1, 7])
def test_mean_follows_synchronous_sgd_if_curvatures_are_equal(period):
  h, b = jnp.array([0.8, 0.8]), jnp.array([-1.0, 3.0])
  _, means = _run(_local_sgd(period), h, b, 5, period, 4.0)
  x, expected = 4.0, []
  for _ in means:
    x -= ETA * float(jnp.mean(h * (x - b)))
    expected.append(x)
  np.testing.assert_allclose(means, expected, rtol=1e-5)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("h", "period"), [(1.0, 1), (3.0, 5)])
def test_stability_border_of_outer_nesterov_matches_theory(mu, h, period):
  gain = 1 - (1 - ETA * h) ** period

  def tx(rate):
    outer = optax.sgd(rate, momentum=mu, nesterov=True)
    return local_updates(
      optax.sgd(ETA), outer, "i", communication_period=period, num_replicas=1
    )

  def is_stable(lr):
    curvatures, optima = jnp.array([h]), jnp.array([0.0])
    centers, _ = _run(tx, curvatures, optima, 1000, period, 1.0, lr)
    size = jnp.abs(centers[-20:]).max()
    assert not 0.2 < size < 1, "too close to the border to tell"
    return bool(size < 1)

  border = (2 + 2 * mu) / (1 + 2 * mu) / gain
  assert is_stable(0.97 * border)
  assert not is_stable(1.03 * border)
  assert is_stable(0.03 / gain)
  assert not is_stable(-0.03 / gain)
