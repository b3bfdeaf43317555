"""Tests of putting arrays where a mesh has them."""

import jax
import jax.numpy as jnp
import launch
import maps
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist


def test_arrays_are_placed_by_their_specs():
  tree = {"x": np.arange(8.0), "y": jnp.ones(3), "n": None, "key": None}
  tree["key"] = jax.random.key(0)
  placed = optax_dist.states.place(
    tree, maps.mesh(4), {"x": P(maps.AXIS), "y": P(), "n": None, "key": P()}
  )
  assert placed["x"].sharding.spec == P(maps.AXIS)
  assert placed["x"].addressable_shards[1].data.tolist() == [2.0, 3.0]
  assert placed["y"].sharding.is_fully_replicated
  assert placed["n"] is None
  assert len(placed["key"].sharding.device_set) == 4


def test_one_spec_may_cover_all_arrays():
  placed = optax_dist.states.place(
    {"a": {"b": np.ones((4, 2))}, "c": np.ones(8)}, maps.mesh(4), P(maps.AXIS)
  )
  specs = jax.tree.map(lambda x: x.sharding.spec, placed)
  assert specs == {"a": {"b": P(maps.AXIS)}, "c": P(maps.AXIS)}


@pytest.mark.parametrize(
  ("shape", "spec"), [((6,), P(maps.AXIS)), ((), P(maps.AXIS)), ((4,), P("x"))]
)
def test_mismatched_shapes_are_named(shape, spec):
  with pytest.raises(ValueError, match=r"place: \['w'\] of shape .* can't be"):
    optax_dist.states.place({"w": np.zeros(shape)}, maps.mesh(4), spec)


def _place_keys():
  """Runs in each process; returns its own rows of a state with random keys."""
  size = jax.device_count()
  tree = {"keys": jax.random.split(jax.random.key(0), size), "x": jnp.arange(3)}
  placed = optax_dist.states.place(
    tree, maps.mesh(size), {"keys": P(maps.AXIS), "x": P()}
  )
  assert placed["x"].sharding.is_fully_replicated
  return [
    np.asarray(jax.random.key_data(shard.data[0]))
    for shard in placed["keys"].addressable_shards
  ]


def test_random_keys_are_placed_over_processes():
  by_process = launch.run(_place_keys, processes=2, devices=1)
  expected = jax.random.key_data(jax.random.split(jax.random.key(0), 2))
  np.testing.assert_array_equal(np.concatenate(by_process), expected)


@jax.numpy_dtype_promotion("standard")  # As optax needs.
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_placed_state_does_not_recompile_the_step(kind):
  """Otherwise its second call would compile again."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
  tx = optax.chain(optax_dist.cross_shard("data"), optax.adam(0.1))

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
  )
  def step(params, state, batch):
    grads = jax.grad(lambda w: (batch @ w).mean())(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  kept = jnp.zeros((3, 2)), tx.init(jnp.zeros((3, 2)))
  kept = optax_dist.states.place(kept, mesh, P())
  batch = optax_dist.states.place(jnp.ones((4, 3)), mesh, P("data"))
  for _ in range(3):
    kept = step(*kept, batch)
  assert step._cache_size() == 1
