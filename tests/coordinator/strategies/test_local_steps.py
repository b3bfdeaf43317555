"""Steps of a replica's own optimizer between two exchanges."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.coordinator.strategies import (
  elastic_average,
  local_updates,
  strategy,
)

OPT = optax.sgd(0.5, momentum=0.5)
_SHARED = strategy.SharedState(jnp.ones(2), ())
_QUORUM = strategy.Quorum(1, 1)


@pytest.fixture(scope="module")
def steps():
  """Elastic averaging, which sends the parameters."""
  return elastic_average(moving_rate=0.3, communication_period=2)(OPT, _QUORUM)


def _by_hand(gradients):
  params, state = _SHARED.params, OPT.init(_SHARED.params)
  for grads in gradients:
    updates, state = OPT.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


def test_it_takes_its_steps_and_then_has_something_to_send(steps):
  local = steps.local(_SHARED)
  gradients = [jnp.array([1.0, 2.0]), jnp.array([-3.0, 0.5])]
  sent = []
  for grads in gradients:
    payload, local = steps.contribute(_SHARED, local, grads)
    sent.append(payload)
  assert sent[0] is None
  np.testing.assert_array_equal(sent[1], _by_hand(gradients))
  assert steps.params(_SHARED, local) is local.params


def test_a_rejected_change_is_sent_again_unchanged(steps):
  """Another step would be one that the exchange's period doesn't have."""
  local = steps.local(_SHARED)
  for _ in range(2):
    first, local = steps.contribute(_SHARED, local, jnp.ones(2))
  again, after = steps.contribute(_SHARED, local, jnp.full(2, 100.0))
  np.testing.assert_array_equal(again, first)
  assert after is local


def test_steps_that_are_forgotten_leave_the_momentum(steps):
  local = steps.local(_SHARED)
  _, local = steps.contribute(_SHARED, local, jnp.ones(2))
  forgot = steps.local(_SHARED, steps.inner_state(local))
  np.testing.assert_array_equal(forgot.params, _SHARED.params)
  assert (forgot.steps, forgot.opt_state) == (0, local.opt_state)
  # A whole period comes before the next exchange.
  payload, _ = steps.contribute(_SHARED, forgot, jnp.ones(2))
  assert payload is None


@pytest.mark.parametrize("period", [0, -1, True, 2.5, "2"])
def test_an_invalid_period_is_refused(period):
  with pytest.raises(ValueError, match="communication_period"):
    elastic_average(moving_rate=0.3, communication_period=period)
  with pytest.raises(ValueError, match="communication_period"):
    local_updates(communication_period=period)
