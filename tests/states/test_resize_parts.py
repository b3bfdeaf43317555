"""Tests of resizing the state of sharded."""

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
#: Leaves that divide by N, that are padded, a scalar, and one without elements.
PARAMS = {
  "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  "b": np.linspace(0, 1, 7, dtype=np.float32),
  "s": np.float32(0.5),
  "empty": np.zeros((0, 2), np.float32),
  "none": None,
}


def _sharded(inner, size=N):
  return optax_dist.sharded(inner, maps.AXIS, num_replicas=size)


def _with_values(state):
  """Random numbers in place of the zeros that a state starts with."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: np.asarray(rng.uniform(1, 99, size=x.shape)).astype(x.dtype),
    state,
  )


_whole = {
  name: None if x is None else np.arange(1, x.size + 1).reshape(x.shape)
  for name, x in PARAMS.items()
}


def _in_parts(size):
  """A state of the numbers 1, 2, 3, ... of each leaf, padded with zeros."""

  def cut(x):
    full = np.zeros([max(1, n) for n in x.shape] or 1, np.float32)
    full[tuple(map(slice, x.shape))] = x
    waste = [(-n % size) / n for n in full.shape]
    axis = waste.index(min(waste))
    pad = [(0, (-n % size) * (i == axis)) for i, n in enumerate(full.shape)]
    slices = np.split(np.pad(full, pad), size, axis)
    return optax_dist.PerReplica(np.stack(slices))

  state = _sharded(optax.trace(0.9), size).init(PARAMS)
  trace = state.inner_state._replace(trace=jax.tree.map(cut, _whole))
  return state._replace(inner_state=trace)


@pytest.mark.parametrize("new", [1, 2, 3, 5, 13])
@pytest.mark.parametrize("old", [1, 4])
def test_resized_shards_equal_those_of_a_new_state(old, new):
  """With fewer replicas or more, even more than there are elements."""
  resized = optax_dist.states.resize_sharded(_in_parts(old), PARAMS, new)
  chex.assert_trees_all_equal(resized, _in_parts(new))


@jax.numpy_dtype_promotion("standard")  # As injected numbers need.
def test_shared_state_is_unchanged_by_resizing():
  """Counters, schedules and what is not sharded at all, wherever it is."""
  mask = {
    name: None if x is None else name == "w" for name, x in PARAMS.items()
  }
  inner = optax.chain(
    optax.clip(1.0),
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    optax.masked(optax.trace(0.5), mask),
  )
  make = lambda size: optax.chain(
    optax.trace(0.9), _sharded(inner, size), optax.scale_by_schedule(float)
  )
  state = _with_values(make(N).init(PARAMS))
  resized = optax_dist.states.resize_sharded(state, PARAMS, 3)
  chex.assert_trees_all_equal_shapes_and_dtypes(resized, make(3).init(PARAMS))
  chex.assert_trees_all_equal((resized[0], resized[2]), (state[0], state[2]))
  chex.assert_trees_all_equal(
    resized[1].inner_state[1].hyperparams, state[1].inner_state[1].hyperparams
  )


def test_shapes_are_enough_for_the_parameters():
  shapes = jax.eval_shape(lambda: PARAMS)
  resized = optax_dist.states.resize_sharded(_in_parts(N), shapes, 3)
  chex.assert_trees_all_equal(resized, _in_parts(3))


@pytest.mark.parametrize("explicit", [False, True])
def test_resized_state_is_on_the_host(explicit):
  """The old mesh fits no more."""
  state = _in_parts(N)
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  placed = optax_dist.states.place(state, maps.mesh(N, explicit), specs)
  resized = optax_dist.states.resize_sharded(placed, PARAMS, 3)
  chex.assert_trees_all_equal(resized, _in_parts(3))
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(resized))


@pytest.mark.parametrize("names", [("data", "model"), ("data",)])
def test_sharded_model_shards_are_refused(names):
  """Nothing is padded here, so only the sharding tells them from whole ones."""
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  params = {"w": jnp.arange(24.0).reshape(4, 6)}
  specs = {"w": P(None, "model") if "model" in names else P()}
  tx = _sharded(optax.trace(0.9), 2)
  of_state = optax_dist.states.state_specs(
    jax.eval_shape(tx.init, params), maps.AXIS, param_specs=specs
  )
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(specs,), out_specs=of_state
  )
  state = jax.jit(init)(params)
  assert state.inner_state.trace["w"].value.shape == (2, 2, 6)
  if names == ("data",):
    optax_dist.states.resize_sharded(state, params, 1)
    return
  with pytest.raises(ValueError, match="sharded over model axes too"):
    optax_dist.states.resize_sharded(state, params, 1)


def test_invalid_arguments_are_refused():
  state = _in_parts(N)
  with pytest.raises(ValueError, match="there is no state of sharded"):
    optax_dist.states.resize_sharded(optax.sgd(0.1).init(PARAMS), PARAMS, 2)
  other = PARAMS | {"b": np.zeros(9, np.float32)}
  with pytest.raises(
    ValueError, match=r"\(4, 2\) for a parameter of shape \(9,"
  ):
    optax_dist.states.resize_sharded(state, other, 2)
  with pytest.raises(ValueError, match="not in a tree like `params`"):
    optax_dist.states.resize_sharded(state, PARAMS | {"more": np.zeros(2)}, 2)
