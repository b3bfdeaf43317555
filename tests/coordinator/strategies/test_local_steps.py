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


def test_a_rejected_change_is_sent_again_unchanged(steps):
  """Another local step would exceed the communication period."""
  local = steps.local(_SHARED)
  for _ in range(2):
    first, local = steps.contribute(_SHARED, local, jnp.ones(2))
  again, after = steps.contribute(_SHARED, local, jnp.full(2, 100.0))
  np.testing.assert_array_equal(again, first)
  assert after is local


@pytest.mark.parametrize("period", [0, -1, True, 2.5, "2"])
def test_an_invalid_period_is_refused(period):
  with pytest.raises(ValueError, match="communication_period"):
    elastic_average(moving_rate=0.3, communication_period=period)
  with pytest.raises(ValueError, match="communication_period"):
    local_updates(communication_period=period)
