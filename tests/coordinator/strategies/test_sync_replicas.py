"""Sync replicas: all that a replica has is what all have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist.coordinator.strategies import strategy, sync_replicas


def test_gradients_are_sent_and_their_mean_applied_and_nothing_is_its_own():
  opt = optax.sgd(0.5, momentum=0.9)
  made = sync_replicas.SyncReplicas(opt, strategy.Quorum(2, 3))
  params = {"x": jnp.array([1.0, 2.0])}
  shared = made.shared(params)
  local = made.local(shared)
  state = opt.init(params)
  for number in range(2):
    grads = {"x": jnp.array([1.0, -1.0]) * (number + 1)}
    payload, local = made.contribute(shared, local, grads)
    assert payload is grads
    before, shared = shared, made.apply(shared, payload)
    updates, state = opt.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    for mine in (True, False):
      assert made.settle(before, shared, local, mine) == local
    assert made.params(shared, made.local(shared)) is shared.params
  # One that joins later needs nothing else.
  assert made.local(shared) == local
  expected = strategy.SharedState(params, state)
  jax.tree.map(np.testing.assert_allclose, shared, expected)
