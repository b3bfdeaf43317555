"""Each optimizer counts its steps, to be read as TensorFlow's scripts do."""

import every_optimizer
import jax
import jax.numpy as jnp
import maps
import optax
import pytest

import optax_dist

N = 2
_every = pytest.mark.parametrize("name", every_optimizer.BY_NAME)


def _after(tx, steps, params):
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  run = jax.jit(
    jax.vmap(
      lambda state, grad: tx.update(grad, state, params)[1],
      in_axes=(axes, 0),
      out_axes=axes,
      axis_name=maps.AXIS,
    )
  )
  for _ in range(steps):
    state = run(state, jax.tree.map(lambda x: jnp.ones((N, *x.shape)), params))
  return state


@_every
def test_global_step_is_found_in_any_chain(name):
  tx = optax.chain(
    optax.clip(1.0),
    optax_dist.cross_shard(maps.AXIS),
    every_optimizer.BY_NAME[name](0.1),
    optax_dist.params_ema(0.9),
  )
  state = _after(tx, 3, {"w": jnp.ones(2)})
  assert optax.tree.get(state, "global_step") == 3


@_every
def test_outer_transform_has_the_only_global_step(name):
  """Steps that take two gradients each, and rounds of two steps."""
  inner = every_optimizer.BY_NAME[name](0.1)
  shared = optax_dist.sync_replicas(
    inner, maps.AXIS, replicas_to_aggregate=2 * N, total_num_replicas=N
  )
  own = optax_dist.local_updates(
    inner,
    every_optimizer.BY_NAME[name](1.0),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
  )
  params = {"w": jnp.ones(2)}
  for tx in (shared, own):
    state = optax.chain(optax.clip(1.0), tx).init(params)
    assert optax.tree.get(state, "global_step") == 0
  state = _after(optax.chain(optax.clip(1.0), shared), 4, params)
  assert optax.tree.get(state, "global_step") == 2


def test_sharded_optimizer_keeps_its_global_step():
  tx = optax_dist.sharded(
    optax_dist.optimizers.momentum(0.1, 0.9), maps.AXIS, num_replicas=N
  )
  state = _after(tx, 3, {"w": jnp.ones(2)})
  assert optax.tree.get(state, "global_step") == 3
