"""Threads of a replica compute in its precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator


# In the event loop, and in the thread for what takes long.
@pytest.mark.parametrize("size", [3, 100_000])
def test_float64_of_a_context_holds_in_all_threads_of_a_replica(size):
  def train(replica):
    grads = jnp.full(size, 1e-12)
    for _ in range(2):
      assert replica.step(grads).accepted
    return replica.params

  with jax.enable_x64(True):
    result = coordinator.run_embedded(
      train, 1, optax.sgd(1.0), jnp.ones(size), timeout=60.0
    )[0]
  assert result.dtype == np.float64
  np.testing.assert_allclose(1.0 - np.asarray(result), 2e-12, rtol=1e-3)


def test_deterministic_runs_keep_float64_of_a_context():
  """A leaf as large as this is shortened on its device, in the sums' thread."""
  data = coordinator.Batches(2, 1, micro_batch=1, deterministic=True)

  def train(replica):
    for _ in replica.micro_batches():
      replica.step(jnp.full(100_000, 1.0 + 1e-12))
    return replica.params

  with jax.enable_x64(True):
    (result,) = coordinator.run_embedded(
      train,
      1,
      optax.sgd(1.0),
      jnp.zeros(100_000),
      data=data,
      probe=None,
      timeout=60.0,
    )
  np.testing.assert_allclose(-2.0 - np.asarray(result), 2e-12, rtol=1e-3)
