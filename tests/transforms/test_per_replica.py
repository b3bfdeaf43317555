"""Tests of wrappers with per-replica state, under vmap, pmap and shard_map."""

import collections

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
PARAMS = {"w": np.zeros(3, np.float32)}
TICKS = 4


def _gradients():
  rng = np.random.default_rng(0)
  return rng.normal(size=(TICKS, N, 3)).astype(np.float32)


def _stepper(map_name, tx, state):
  return maps.stepper(
    map_name, lambda s, g: tx.update({"w": g}, s, PARAMS), state, N
  )


def _by_one(tx):
  """The updates of one device that has all gradients."""
  state, updates = tx.init(PARAMS), []
  for gradient in _gradients().mean(axis=1):
    update, state = tx.update({"w": gradient}, state, PARAMS)
    updates.append(update["w"])
  return updates


@jax.numpy_dtype_promotion("standard")  # As Adam and MultiSteps need.
@pairwise.every_value(map_name=maps.NAMES, sync=[False, True])
def test_multi_steps_accumulates_local_gradients(map_name, sync):
  adam = optax.adam(0.1)
  if sync:
    aggregated = optax_dist.sync_replicas(
      adam, maps.AXIS, replicas_to_aggregate=N, total_num_replicas=N
    )
  else:
    aggregated = optax.chain(optax_dist.cross_shard(maps.AXIS), adam)
  tx = optax_dist.per_replica(
    optax.MultiSteps(aggregated, 2), maps.AXIS, "acc_grads", num_replicas=N
  )
  state = tx.init(PARAMS)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  run = _stepper(map_name, tx, state)
  expected = _by_one(optax.MultiSteps(adam, 2))
  for t, gradient in enumerate(_gradients()):
    updates, state = run(state, gradient)
    for row in updates["w"]:
      np.testing.assert_allclose(row, expected[t], rtol=1e-4, atol=1e-6)
    if not t % 2:
      own = state.acc_grads.value.value["w"]
      np.testing.assert_allclose(own, gradient, rtol=1e-6)
    assert state.acc_grads.value.local_step.tolist() == [t + 1] * N
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes


@jax.numpy_dtype_promotion("standard")
def test_parameters_keep_their_types():
  """Also containers that are neither a dict nor a list."""
  adam = optax.chain(optax_dist.cross_shard(maps.AXIS), optax.adam(0.1))
  tx = optax_dist.per_replica(
    optax.MultiSteps(adam, 2), maps.AXIS, "acc_grads", num_replicas=N
  )
  params = collections.OrderedDict(w=np.zeros(3, np.float32))
  state = tx.init(params)
  assert type(state.inner_opt_state[1][0].mu) is collections.OrderedDict
  step = lambda s, g: tx.update(collections.OrderedDict(w=g), s, params)
  run = maps.stepper("vmap", step, state, N)
  updates, after = run(state, _gradients()[0])
  assert type(updates) is collections.OrderedDict
  assert jax.tree.structure(after) == jax.tree.structure(state)


@maps.both_kinds
def test_whole_state_before_the_mean_belongs_to_each_replica(map_name):
  tx = optax.chain(
    optax_dist.per_replica(optax.trace(0.5), maps.AXIS, num_replicas=N),
    optax_dist.cross_shard(maps.AXIS),
  )
  state = tx.init(PARAMS)
  run = _stepper(map_name, tx, state)
  traces = np.zeros((N, 3), np.float32)
  for gradient in _gradients():
    traces = gradient + 0.5 * traces
    updates, state = run(state, gradient)
    np.testing.assert_allclose(
      state[0].value.value.trace["w"], traces, rtol=1e-5, atol=1e-6
    )
    for row in updates["w"]:
      np.testing.assert_allclose(row, traces.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_extra_arguments_go_through():
  def update_fn(updates, state, params=None, *, scale):
    return jax.tree.map(lambda x: x * scale, updates), state

  scaled = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update_fn
  )
  tx = optax_dist.per_replica(scaled, maps.AXIS, num_replicas=N)
  updates = maps.run(
    "vmap",
    lambda g: tx.update(
      g, optax_dist.PerReplica(_own_state(g)), scale=jnp.float32(2.0)
    )[0],
    np.ones((N, 2), np.float32),
    size=N,
  )
  assert updates.tolist() == [[2.0, 2.0]] * N


def _own_state(g):
  return optax_dist.transforms.per_replica.OwnState(
    jnp.zeros_like(g[0], jnp.int32), optax.EmptyState()
  )


def test_specs_of_state_shaped_like_a_parameter_follow_it():
  tx = optax_dist.per_replica(
    optax.MultiSteps(optax.adam(0.1), 2), "data", "acc_grads", num_replicas=N
  )
  specs = optax_dist.states.state_specs(
    jax.eval_shape(tx.init, PARAMS), "data", param_specs={"w": P("model")}
  )
  assert specs.acc_grads.value.value == {"w": P("data", "model")}
  assert specs.inner_opt_state[0].mu == {"w": P("model")}
  assert specs.mini_step == P()


def test_invalid_arguments_are_refused():
  sync = optax_dist.sync_replicas(
    optax.sgd(0.1), "data", replicas_to_aggregate=N, total_num_replicas=N
  )
  with pytest.raises(ValueError, match=r"of one replica in it already.*Name"):
    optax_dist.per_replica(sync, "data", num_replicas=N).init(PARAMS)
  with pytest.raises(ValueError, match="no field 'acc'; it has acc_grads"):
    optax_dist.per_replica(
      optax.MultiSteps(sync, 2), "data", "acc", num_replicas=N
    ).init(PARAMS)
  with pytest.raises(ValueError, match="number of replicas is not known"):
    optax_dist.per_replica(optax.trace(0.5), "data").init(PARAMS)
