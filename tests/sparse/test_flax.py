"""Tests of saving sums of sparse gradients with ``flax.serialization``."""

import chex
import flax.serialization
import jax
import jax.numpy as jnp

import optax_dist
from optax_dist import IndexedSlices, optimizers


def _state(rows):
  tx = optax_dist.sync_replicas(
    optimizers.gradient_descent(0.1),
    "data",
    replicas_to_aggregate=4,
    total_num_replicas=2,
    sparse_capacity={"table": 3, "w": None},
  )
  params = {"table": jnp.zeros((9, 2)), "w": jnp.zeros(2)}
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)

  def update(state, rows):
    slices = IndexedSlices(jnp.ones((2, 2)), rows, (9, 2))
    return tx.update({"table": slices, "w": jnp.ones(2)}, state, params)[1]

  step = jax.vmap(update, in_axes=(axes, 0), out_axes=axes, axis_name="data")
  return state, jax.jit(step)(state, jnp.array(rows))


def test_state_with_sparse_sums_survives_flax_serialization():
  empty, state = _state([[1, 4], [4, 8]])
  saved = flax.serialization.to_bytes(state)
  restored = flax.serialization.from_bytes(empty, saved)
  chex.assert_trees_all_equal(restored, state)
  total = restored.replica.value.gradient_sum["table"]
  assert total.indices[:, :2].tolist() == [[1, 4], [4, 8]]
  assert total.touches.tolist() == [[1, 1, 0], [1, 1, 0]]
