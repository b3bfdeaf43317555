"""Tests of which parts of a state belong to one replica, through wrappers."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist._internal.replica_blocks import as_block, own_block

N = 4
PARAMS = {"w": np.ones(2, np.float32), "frozen": np.ones(2, np.float32)}


def _tx(inner=None):
  return optax_dist.sync_replicas(
    inner or optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=N + 1,
    total_num_replicas=N,
  )


WRAPPERS = {
  "alone": _tx,
  "chain": lambda: optax.chain(optax.clip(1.0), _tx()),
  "inject_hyperparams": lambda: optax.inject_hyperparams(
    lambda learning_rate: _tx(optax.sgd(learning_rate))
  )(learning_rate=0.5),
  "multi_steps": lambda: optax.MultiSteps(_tx(), 2).gradient_transformation(),
  "inside_of_inject_hyperparams": lambda: _tx(
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
  ),
  "masked": lambda: optax.masked(_tx(), {"w": True, "frozen": False}),
  "partition": lambda: optax.partition(
    {"sync": _tx(), "none": optax.set_to_zero()},
    {"w": "sync", "frozen": "none"},
  ),
}


def _marks(state):
  """Returns, by leaf, whether it belongs to one replica."""
  is_replica = lambda x: isinstance(x, optax_dist.PerReplica)
  marked = jax.tree.map(
    lambda node: jax.tree.map(lambda _: is_replica(node), node),
    state,
    is_leaf=is_replica,
  )
  return jax.tree.leaves(marked)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("abstract", [False, True])
def test_every_leaf_has_its_spec_and_axis(wrapper, abstract):
  init = WRAPPERS[wrapper]().init
  state = jax.eval_shape(init, PARAMS) if abstract else init(PARAMS)
  marks = _marks(state)
  assert set(marks) == {True, False}
  by_leaf = jax.tree.structure(state).flatten_up_to
  specs = by_leaf(optax_dist.state_specs(state, maps.AXIS))
  assert specs == [P(maps.AXIS) if own else P() for own in marks]
  axes = by_leaf(optax_dist.state_axes(state))
  assert axes == [0 if own else None for own in marks]
  for leaf, own in zip(jax.tree.leaves(state), marks, strict=True):
    assert not own or leaf.shape[0] == N


@pytest.mark.parametrize("map_name", ["vmap", "pmap", "shard_map_vma"])
# The sums of MultiSteps belong to a replica too, which nothing says of them.
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS.keys() - {"multi_steps"}))
def test_wrapped_states_go_through_a_map(map_name, wrapper):
  tx = WRAPPERS[wrapper]()
  state = tx.init(PARAMS)
  step = lambda state, g: tx.update(
    {"w": g, "frozen": jnp.zeros_like(g)}, state, PARAMS
  )
  run = maps.stepper(map_name, step, state, N)
  gradients = np.tile(np.float32([0.25, 0.5]), (N, 1))
  for t in range(2):  # Two ticks make a step.
    updates, state = run(state, gradients)
    rate = 0.5 if "inject" in wrapper else 1.0
    np.testing.assert_allclose(updates["w"], -rate * t * gradients)
  assert optax_dist.sync_report(state).accepted.tolist() == [2] * N


def test_several_axes_and_none():
  state = _tx().init(PARAMS)
  specs = optax_dist.state_specs(state, ["a", "b"])
  assert specs.replica.value.local_step == P(("a", "b"))
  assert optax_dist.state_specs({"x": 1.0, "n": None}, "a") == {
    "x": P(),
    "n": None,
  }
  with pytest.raises(ValueError, match="`axis_name` must hold"):
    optax_dist.state_specs(state, ())


@pytest.mark.parametrize("leading", [False, True])
def test_a_block_comes_out_as_it_went_in(leading):
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
  assert "optax_dist.state_specs(state" in str(info.value)
  assert "optax_dist.state_axes(state)" in str(info.value)
