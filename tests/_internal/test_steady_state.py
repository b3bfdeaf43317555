"""A parameter without a gradient keeps its part of the state."""

import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal.steady_state import with_steady_state


def test_a_momentum_outlives_a_step_without_a_gradient():
  tx = with_steady_state(optax.trace(0.5))
  state = tx.init({"w": jnp.zeros(1)})
  for gradient, expected in ((1.0, 1.0), (None, 1.0), (1.0, 1.5)):
    given = None if gradient is None else jnp.full(1, gradient)
    updates, state = tx.update({"w": given}, state)
    assert (updates["w"] is None) == (given is None)
    np.testing.assert_allclose(state.trace["w"], [expected])
