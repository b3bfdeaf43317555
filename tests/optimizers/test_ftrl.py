"""Tests of Ftrl-proximal."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers

_OPTIONS = {
  "plain": {},
  "l1": {"l1_regularization_strength": 0.5},
  "l2": {"l2_regularization_strength": 0.5},
  "shrinkage": {"l2_shrinkage_regularization_strength": 0.25},
  "beta": {"beta": 0.5, "l2_regularization_strength": 0.25},
  "power": {"learning_rate_power": -0.75, "l1_regularization_strength": 0.125},
  "power of zero": {"learning_rate_power": 0.0, "beta": 0.25},
}


def test_zero_gradient_without_an_accumulator_is_not_nan():
  optimizer = optimizers.ftrl(0.5, initial_accumulator_value=0.0)
  params = jnp.array([1.0, -2.0])
  grads = jnp.array([0.0, 0.0])
  state = optimizer.init(params)
  for _ in range(2):
    updates, state = optimizer.update(grads, state, params)
    params = params + updates
    assert params.tolist() == [0.0, 0.0]


def test_ftrl_needs_the_parameters():
  optimizer = optimizers.ftrl(0.1)
  params = jnp.ones(2)
  with pytest.raises(ValueError, match="reads the parameters"):
    optimizer.update(params, optimizer.init(params))


@pytest.mark.parametrize("options", _OPTIONS)
def test_schedule_at_zero_changes_nothing(options):
  """A warm-up begins there, and the rule divides by the rate."""
  schedule = lambda count: jnp.where(count == 1, 0.0, 0.5)
  optimizer = optimizers.ftrl(schedule, **_OPTIONS[options])
  params, grads = jnp.array([1.0, 0.0]), jnp.array([0.5, -2.0])
  updates, before = optimizer.update(grads, optimizer.init(params), params)
  params += updates
  updates, after = optimizer.update(grads, before, params)
  np.testing.assert_array_equal(updates, 0)
  for name, slot in before.slots.items():
    np.testing.assert_array_equal(after.slots[name], slot)
  updates, _ = optimizer.update(grads, after, params)
  assert np.isfinite(updates).all()
