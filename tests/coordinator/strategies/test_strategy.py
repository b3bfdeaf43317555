"""What strategies share: the quorum's numbers, and means that arrive as bytes."""

import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator.strategies import strategy


def test_a_mean_in_bfloat16_is_read_as_numbers():
  """It arrives as the upper halves of float32, in whole numbers."""
  values = np.array([1.0, -2.5, 3e38, -0.0, 1e-30], np.float32)
  halves = (values.view(np.uint32) >> 16).astype(np.uint16)
  expected = (halves.astype(np.uint32) << 16).view(np.float32)
  for dtype in (jnp.float32, jnp.bfloat16):
    found = strategy.owned(jnp.asarray(halves), jnp.zeros(5, dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
  # Parameters of that dtype are whole numbers themselves.
  found = strategy.owned(jnp.asarray(halves), jnp.zeros(5, jnp.uint16))
  np.testing.assert_array_equal(found, halves)
