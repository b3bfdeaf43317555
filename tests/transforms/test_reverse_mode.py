"""Differentiating through steps, exchanges and rounds, in reverse."""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise

import optax_dist

N = 4
ARGUMENTS = {
  "elastic_average": {},
  "local_updates": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
  "streaming_updates": {"outer": optax.sgd(0.5), "delay": 1, "mix": 0.5},
  "sync_replicas": {},
}


@pairwise.every_value(
  map_name=["vmap", "shard_map", "shard_map_vma"], kind=list(ARGUMENTS)
)
def test_gradient_matches_finite_differences(map_name, kind):
  tx = every_transform.make(kind, optax.sgd(0.1), N, **ARGUMENTS[kind])
  state = tx.init(jnp.ones(3))

  def train(state, scale, params):
    scale = optax_dist.local_params(scale, maps.AXIS)
    for _ in range(4):
      gradient = scale * params * jnp.arange(1.0, 4.0)
      updates, state = tx.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
    return jnp.sum(params**2), state

  # All four steps in the map; what is summed over the replicas is outside.
  params = np.arange(1.0, 1 + 3 * N, dtype=np.float32).reshape(N, 3) / 5
  run = maps.stepper(
    map_name,
    lambda state, scale, params: (
      jax.value_and_grad(lambda s: train(state, s, params)[0])(scale),
      state,
    ),
    state,
    N,
  )
  at = lambda scale: run(state, np.full(N, scale, np.float32), params)[0]
  # Each replica's value depends on all replicas' scales; together they add up.
  total = np.sum(at(1.0)[1])
  expected = (np.sum(at(1.01)[0]) - np.sum(at(0.99)[0])) / 0.02
  np.testing.assert_allclose(total, expected, rtol=2e-3)
