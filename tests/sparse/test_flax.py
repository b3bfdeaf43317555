"""Tests of saving sparse slices with ``flax.serialization``."""

import subprocess
import sys

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import pytest

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


def test_a_state_with_sparse_sums_comes_back():
  empty, state = _state([[1, 4], [4, 8]])
  saved = flax.serialization.to_bytes(state)
  restored = flax.serialization.from_bytes(empty, saved)
  chex.assert_trees_all_equal(restored, state)
  total = restored.replica.value.gradient_sum["table"]
  assert total.indices[:, :2].tolist() == [[1, 4], [4, 8]]
  assert total.touches.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_slices_come_back():
  slices = IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 4]), (9, 2))
  saved = flax.serialization.to_bytes(slices)
  restored = flax.serialization.from_bytes(slices, saved)
  assert restored.dense_shape == (9, 2)
  assert restored.indices.tolist() == [1, 4]
  # As arrays of the device, in the dtype that is not computed with.
  chex.assert_trees_all_equal_shapes_and_dtypes(restored, slices)


def test_other_arrays_are_refused():
  slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
  with pytest.raises(ValueError, match="must have the arrays 'values' and"):
    flax.serialization.from_state_dict(slices, {"values": jnp.ones((1, 2))})


def test_flax_is_not_imported_for_it():
  code = (
    "import sys, jax.numpy as jnp, optax_dist;"
    "optax_dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2));"
    "assert 'flax' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
