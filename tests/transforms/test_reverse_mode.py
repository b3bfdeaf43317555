"""Differentiating through steps, exchanges and rounds, in reverse."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise

import optax_dist

N = 4
MAKERS = {
  "elastic": lambda: optax_dist.elastic_average(
    optax.sgd(0.1), maps.AXIS, num_replicas=N, communication_period=2, rho=0.1
  ),
  "local": lambda: optax_dist.local_updates(
    optax.sgd(0.1),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
  ),
  "streaming": lambda: optax_dist.streaming_updates(
    optax.sgd(0.1),
    optax.sgd(0.5),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
    fragments=1,
    delay=1,
    mix=0.5,
  ),
  "sync": lambda: optax_dist.sync_replicas(
    optax.sgd(0.1), maps.AXIS, total_num_replicas=N, replicas_to_aggregate=N
  ),
}


@pairwise.every_value(
  map_name=["vmap", "shard_map", "shard_map_vma"], kind=list(MAKERS)
)
def test_the_gradient_is_that_of_finite_differences(map_name, kind):
  tx = MAKERS[kind]()
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
