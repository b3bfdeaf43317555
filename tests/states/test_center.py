"""Tests of reading the center, starting from it, and growing from it."""

import functools

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from own_params import row, stack, take_step

from optax_dist.states import state_specs
from optax_dist.states.center import (
  center_params,
  reset_to_center,
  resize_from_center,
)
from optax_dist.transforms.elastic_average import elastic_average

N = 4


def _tx(inner=None, **kwargs):
  return optax.chain(
    optax.clip(10.0),
    elastic_average(
      inner or optax.trace(0.9),
      maps.AXIS,
      communication_period=2,
      moving_rate=0.2,
      rho=0.1,
      **kwargs,
    ),
  )


def _start():
  return {"w": jnp.arange(6.0).reshape(3, 2), "b": [jnp.ones(())]}


def _gradients(seed, size=N):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(size=(size, *x.shape)).astype(np.float32), _start()
  )


def _train(map_name, tx, state, params, seeds, size=N):
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, size)
  for seed in seeds:
    params, state = run(state, params, _gradients(seed, size))
  return params, state


def _trained(map_name="shard_map_vma"):
  """After three steps, one of them past the exchange: all differ."""
  tx = _tx(num_replicas=N)
  return _train(map_name, tx, tx.init(_start()), stack(_start()), range(3))


def test_the_center_is_found_in_a_chain():
  params, state = _trained("vmap")
  center = center_params(state)
  chex.assert_trees_all_equal_shapes_and_dtypes(center, _start())
  chex.assert_trees_all_equal(center, state[1].center)
  assert np.abs(params["w"] - np.asarray(center["w"])).min() > 1e-3


def test_there_must_be_one_center():
  state = _tx(num_replicas=N).init(_start())
  with pytest.raises(ValueError, match="there are 2"):
    center_params((state, state))
  with pytest.raises(ValueError, match="there are 0"):
    center_params(optax.adam(0.1).init(_start()))


@pytest.mark.parametrize("map_name", ["vmap", "shard_map_vma"])
def test_reset_to_center_works_outside_of_the_map(map_name):
  params, state = _trained(map_name)
  where = NamedSharding(maps.mesh(N), P(maps.AXIS))
  params = jax.device_put(params, where)
  reset, new_state = reset_to_center(params, state)
  for k in range(N):
    chex.assert_trees_all_equal(row(reset, k), center_params(state))
    own = row(new_state[1].replica.value, k)
    chex.assert_trees_all_equal(own.local_center, center_params(state))
  before, after = (s[1].replica.value for s in (state, new_state))
  chex.assert_trees_all_equal(before.inner_state, after.inner_state)
  chex.assert_trees_all_equal(before.local_step, after.local_step)
  assert reset["w"].sharding == where


@maps.every_map
def test_reset_to_center_works_inside_of_the_map(map_name):
  tx = _tx(num_replicas=N)
  params, state = stack(_start()), tx.init(_start())
  params = jax.tree.map(lambda x: x + np.float32(3.0), params)
  run = maps.stepper(map_name, lambda s, p: reset_to_center(p, s), state, N)
  reset, new_state = run(state, params)
  chex.assert_trees_all_equal(reset, stack(_start()))
  chex.assert_trees_all_equal(jax.device_get(new_state), jax.device_get(state))


def test_a_state_without_center_is_unchanged():
  tx = optax.masked(
    elastic_average(optax.sgd(0.1), "i", num_replicas=2, rho=0.0),
    {"a": True, "b": False},
  )
  state = tx.init({"a": jnp.zeros(2), "b": jnp.zeros(2)})
  params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
  params, _ = reset_to_center(params, state)
  np.testing.assert_array_equal(params["a"], 0.0)
  np.testing.assert_array_equal(params["b"], 1.0)


# --- Another number of replicas ----------------------------------------------


def _placed(tree, size, specs):
  put = lambda spec: NamedSharding(maps.mesh(size), spec)
  is_spec = lambda x: isinstance(x, P)
  return jax.device_put(tree, jax.tree.map(put, specs, is_leaf=is_spec))


@pytest.mark.parametrize("size", [2, 4, 6])
def test_training_continues_with_another_number_of_replicas(size):
  params, state = _trained()
  new_params, new_state = resize_from_center(params, state, size)
  center = center_params(state)
  old, new = (s[1].replica.value for s in (state, new_state))
  for k in range(size):
    own = row(new, k)
    if k < N:
      chex.assert_trees_all_equal(row(new_params, k), row(params, k))
      chex.assert_trees_all_equal(own, row(old, k))
    else:
      chex.assert_trees_all_equal(row(new_params, k), center)
      chex.assert_trees_all_equal(own.local_center, center)
      assert own.local_step == 3
      mean = jax.tree.map(lambda x: np.mean(x, axis=0), old.inner_state)
      chex.assert_trees_all_close(own.inner_state, mean, rtol=1e-6)
  chex.assert_trees_all_equal(center_params(new_state), center)
  # And training goes on, with the exchange that is due.
  specs = state_specs(new_state, maps.AXIS)
  tx = _tx(num_replicas=size)
  _, last = _train(
    "shard_map_vma",
    tx,
    _placed(new_state, size, specs),
    new_params,
    [9],
    size,
  )
  assert int(last[1].global_step) == 2
  chex.assert_trees_all_equal_shapes_and_dtypes(last, tx.init(_start()))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_new_replicas_keep_random_keys_and_half_precision(shape):
  keys = jax.random.split(jax.random.key(3), shape)
  tx = elastic_average(
    optax.chain(optax.add_noise(0.1, 0.0, keys), optax.trace(0.9)),
    "i",
    num_replicas=2,
    rho=0.0,
  )
  state = tx.init(jnp.ones(3, jnp.bfloat16))
  params, new = resize_from_center(jnp.ones((2, 3), jnp.bfloat16), state, 5)
  assert params.shape == (5, 3)
  assert params.dtype == jnp.bfloat16
  chex.assert_trees_all_equal_dtypes(new, state)
  assert {x.shape[0] for x in jax.tree.leaves(new.replica)} == {5}
  drawn = jax.random.key_data(optax.tree.get(new, "rng_key"))
  assert len(np.unique(drawn.reshape(-1, 2), axis=0)) == 5 * keys.size


def test_new_replicas_ignore_nonfinite_ones():
  tx = elastic_average(optax.trace(0.9), "i", num_replicas=3, rho=0.0)
  state = tx.init(jnp.zeros(2))
  traces = jnp.array([[1.0, jnp.inf], [jnp.nan, jnp.inf], [3.0, jnp.inf]])
  state = optax.tree.set(state, trace=traces)
  _, state = resize_from_center(jnp.zeros((3, 2)), state, 4)
  new = optax.tree.get(state, "trace")[3]
  np.testing.assert_array_equal(new, [2.0, np.inf])


def test_states_without_per_replica_parts_are_refused():
  params, state = jax.device_get(_trained("vmap"))
  one = row(params, 0)
  with pytest.raises(ValueError, match=r"has shape .*one more axis in front"):
    resize_from_center(one, state, 3)
  fewer = jax.tree.map(lambda x: x[:3], params)
  with pytest.raises(ValueError, match=r"must have a leading axis of 3.*same"):
    resize_from_center(fewer, state, 5)
  with pytest.raises(ValueError, match="there are 0"):
    resize_from_center(params, optax.EmptyState(), 3)
  with pytest.raises(ValueError, match=r"reset_to_center: params.* has shape"):
    reset_to_center(jax.tree.map(lambda x: x[None, None], one), state)


def test_partition_has_one_center():
  """Two elastic groups, each with the other's parameters masked."""
  make = lambda rate: elastic_average(
    optax.sgd(1.0),
    maps.AXIS,
    num_replicas=2,
    communication_period=1,
    moving_rate=rate,
    rho=0.0,
  )
  tx = optax.partition(
    {"fast": make(0.5), "slow": make(0.25)}, {"a": "fast", "b": "slow"}
  )
  start = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
  state = tx.init(start)
  run = maps.stepper(
    "vmap", lambda state, p, g: tx.update(g, state, p), state, 2
  )
  stacked = jax.tree.map(lambda x: np.zeros((2, *x.shape), np.float32), start)
  g = jax.tree.map(lambda x: x - 4, stacked)
  updates, state = run(state, stacked, g)
  center = center_params(state)
  np.testing.assert_array_equal(center["a"], [4.0] * 2)
  np.testing.assert_array_equal(center["b"], [2.0] * 3)
  params, state = reset_to_center(updates, state)
  np.testing.assert_array_equal(params["b"], np.full((2, 3), 2.0))
  params, state = resize_from_center(params, state, 3)
  np.testing.assert_array_equal(params["a"], np.full((3, 2), 4.0))
  with pytest.raises(ValueError, match="for each parameter; there are 2"):
    center_params((state, state))
