"""Tests of one replica's block of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist._internal.replica_blocks import (
  as_block,
  block,
  has_replicas,
  own_block,
  row,
)


@pytest.mark.parametrize("leading", [False, True])
def test_a_block_is_unpacked_and_packed_without_a_change(leading):
  node = optax_dist.PerReplica({"step": jnp.int32(3), "sum": jnp.ones(2)})
  if leading:
    node = jax.tree.map(lambda x: x[None], node)
  value, had = own_block(node, node.value["step"], "a test")
  assert had == leading
  assert value["step"].shape == ()
  assert value["sum"].shape == (2,)
  back = as_block(value, had)
  assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, node)


@pytest.mark.parametrize("shape", [(3,), (0,), (1, 1)])
def test_a_block_of_several_replicas_is_refused(shape):
  node = optax_dist.PerReplica(jnp.zeros(shape, jnp.int32))
  with pytest.raises(ValueError, match="a test: this replica sees") as info:
    own_block(node, node.value, "a test")
  assert f"of {shape[0]} replicas" in str(info.value)
  assert "optax_dist.states.state_specs(state" in str(info.value)
  assert "optax_dist.states.state_axes(state)" in str(info.value)


def test_a_row_of_any_dtype_goes_into_a_block_and_back():
  tree = {
    "key": jax.random.split(jax.random.key(0), 3),
    "flag": jnp.array([True]),
    "scalar": jnp.bfloat16(2.0),
    "empty": jnp.zeros((0, 2), jnp.int32),
    "none": None,
  }
  back = row(block(tree))
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
  np.testing.assert_array_equal(
    jax.random.key_data(back["key"]), jax.random.key_data(tree["key"])
  )


def test_the_rows_of_several_replicas_are_no_row():
  with pytest.raises(ValueError, match=r"shape.*\(2,\)"):
    row({"one": jnp.ones((1, 3)), "two": jnp.ones(2)})


def test_parts_of_replicas_are_found_wherever_they_are():
  mine = optax_dist.PerReplica(jnp.zeros(2))
  state = optax.TraceState({"a": jnp.zeros(2), "b": None})
  assert not has_replicas((state, optax.EmptyState()))
  assert has_replicas(({"deep": [state, mine]},))
  assert has_replicas(optax_dist.PerReplica(None))
