"""What strategies share: the quorum's numbers, and means that arrive as bytes."""

import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator.strategies import strategy


def test_a_mean_in_bfloat16_becomes_numbers_of_the_parameters():
  mean = jnp.array([1.0, -2.5, 3e38, -0.0, 1e-30], jnp.bfloat16)
  for dtype in (jnp.float32, jnp.bfloat16):
    result = strategy.owned(mean, jnp.zeros(5, dtype))
    assert result.dtype == dtype
    np.testing.assert_array_equal(
      np.asarray(result, np.float32), np.asarray(mean, np.float32)
    )
