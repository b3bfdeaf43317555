"""Tests of transforms under plain jit: the numbers and messages of shard_map."""

import collections
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
STEPS = 4
PARAMS = {
  "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  "b": np.linspace(0, 1, 5, dtype=np.float32),
}
_sgd = lambda: optax.sgd(0.1, momentum=0.9)


def _sync():
  return optax_dist.sync_replicas(
    _sgd(), maps.AXIS, replicas_to_aggregate=N - 1, total_num_replicas=N
  )


SHARED = {
  "cross_shard": lambda: optax.chain(optax_dist.cross_shard(maps.AXIS), _sgd()),
  "sync_replicas": _sync,
  "sharded": lambda: optax_dist.sharded(_sgd(), maps.AXIS, num_replicas=N),
}
OWN = {
  "elastic_average": lambda: optax_dist.elastic_average(
    _sgd(),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
    moving_rate=0.1,
    rho=0.1,
  ),
  "local_updates": lambda: optax_dist.local_updates(
    _sgd(),
    optax.sgd(0.7, momentum=0.9),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
  ),
  "streaming_updates": lambda: optax_dist.streaming_updates(
    _sgd(),
    optax.sgd(0.7),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
    fragments=2,
  ),
}
EVERY = SHARED | OWN


def _gradients():
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(size=(STEPS, N, *x.shape)).astype(np.float32)
  return jax.tree.map(draw, PARAMS)


def _args(name):
  """Returns parameters as they are outside of the map, and their spec."""
  if name in SHARED:
    return PARAMS, P()
  return jax.tree.map(lambda x: np.stack([x] * N), PARAMS), P(maps.AXIS)


def _by_shard_map(name):
  tx, (params, spec) = EVERY[name](), _args(name)
  own = name in OWN
  state = tx.init(PARAMS)
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  row = lambda tree: jax.tree.map(lambda x: x[0], tree)
  block = lambda tree: jax.tree.map(lambda x: x[None], tree)

  def step(params, state, gradients):
    one = row(params) if own else params
    updates, state = tx.update(row(gradients), state, one)
    one = optax.apply_updates(one, updates)
    return (block(one) if own else one), state

  run = jax.shard_map(
    step,
    mesh=maps.mesh(N),
    in_specs=(spec, specs, P(maps.AXIS)),
    out_specs=(spec, specs),
  )
  return jax.jit(run), optax_dist.states.place(
    (params, state), maps.mesh(N), (spec, specs)
  )


def _by_plain_jit(name):
  params, spec = _args(name)
  tx = optax_dist.under_jit(
    EVERY[name](), maps.AXIS, mesh=maps.mesh(N), own_params=name in OWN
  )
  params = optax_dist.states.place(params, maps.mesh(N), spec)
  state = jax.jit(tx.init)(params)

  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step), (params, state)


_COLLECTIVE = re.compile(
  r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


@pytest.mark.parametrize("name", EVERY)
def test_under_jit_equals_shard_map(name):
  gradients = optax_dist.states.place(
    _gradients(), maps.mesh(N), P(None, maps.AXIS)
  )
  results, messages = [], []
  for run, (params, state) in (_by_shard_map(name), _by_plain_jit(name)):
    each = [jax.tree.map(lambda x, t=t: x[t], gradients) for t in range(STEPS)]
    step = run.lower(params, state, each[0]).compile()
    for at in each:
      params, new_state = step(params, state, at)
      chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
      state = new_state
    results.append((params, state))
    messages.append(collections.Counter(_COLLECTIVE.findall(step.as_text())))
  chex.assert_trees_all_close(*results, rtol=1e-6)
  assert messages[0] == messages[1]
  assert messages[0].total() >= 1
  places = [jax.tree.map(lambda x: x.sharding, r) for r in results]
  same = jax.tree.map(
    lambda x, a, b: a.is_equivalent_to(b, x.ndim), results[0], *places
  )
  assert all(jax.tree.leaves(same))


def test_state_of_each_replica_is_marked():
  mesh = maps.mesh(N)
  tx = optax_dist.under_jit(_sync(), maps.AXIS, mesh=mesh)
  params = optax_dist.states.place(PARAMS, mesh, P())
  state = jax.jit(tx.init)(params)
  gradients = jax.tree.map(lambda x: x[0], _gradients())
  arrived = optax_dist.PerReplica(np.array([True, False, True, True]))
  updates, state = jax.jit(tx.update)(gradients, state, params, arrived=arrived)
  for name, x in gradients.items():
    mean = np.mean(x[[0, 2, 3]], axis=0)
    np.testing.assert_allclose(updates[name], -0.1 * mean, rtol=1e-5)
  assert optax_dist.sync_report(state).absent.tolist() == [0, 1, 0, 0]


def _two_axes():
  return jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )


def _of_two():
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: rng.normal(size=(2, *x.shape)).astype(np.float32), PARAMS
  )


@pytest.mark.parametrize("name", SHARED)
def test_further_axes_are_left_to_the_compiler(name):
  """Parameters sharded over a model axis that nothing speaks of."""
  mesh, gradients = _two_axes(), _of_two()
  make = {
    "cross_shard": lambda: optax.chain(optax_dist.cross_shard("data"), _sgd()),
    "sync_replicas": lambda: optax_dist.sync_replicas(
      _sgd(), "data", replicas_to_aggregate=2
    ),
    "sharded": lambda: optax_dist.sharded(_sgd(), "data"),
  }[name]
  tx = optax_dist.under_jit(make(), "data", mesh=mesh)
  specs = {"w": P(None, "model"), "b": P()}
  params = optax_dist.states.place(PARAMS, mesh, specs)
  state = jax.jit(tx.init)(params)
  updates, _ = jax.jit(tx.update)(
    optax_dist.states.place(gradients, mesh, P("data")), state, params
  )
  expected = jax.tree.map(lambda x: -0.1 * x.mean(axis=0), gradients)
  chex.assert_trees_all_close(updates, expected, rtol=1e-5)


@pytest.mark.parametrize("by_context", [False, True])
def test_model_shards_follow_their_specs(by_context):
  """The inner transformation sees one shard, and clips by the norm of all."""
  mesh, gradients = _two_axes(), _of_two()
  specs = {"w": P(None, "model"), "b": P()}
  tx = optax_dist.under_jit(
    optax_dist.sharded(
      optax.chain(
        optax_dist.clip_by_global_norm(0.1, ("data", "model")), _sgd()
      ),
      "data",
    ),
    "data",
    mesh=None if by_context else mesh,
    param_specs=specs,
  )
  params = optax_dist.states.place(PARAMS, mesh, specs)

  def one_step(gradients, params):
    state = tx.init(params)
    return tx.update(gradients, state, params)

  if by_context:
    with jax.set_mesh(mesh):
      updates, state = jax.jit(one_step)(gradients, params)
  else:
    updates, state = jax.jit(one_step)(gradients, params)
  one = optax.chain(optax.clip_by_global_norm(0.1), _sgd())
  mean = jax.tree.map(lambda x: x.mean(axis=0), gradients)
  expected, _ = one.update(mean, one.init(PARAMS), PARAMS)
  chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-7)
  trace = state.inner_state[1][0].trace["w"].value
  assert trace.sharding.spec == P("data", None, "model")
  assert trace.shape == (2, 2, 4)


def _in_linen_boxes(x, names):
  return {"w": nn.Partitioned(x, names)}


def _in_nnx_boxes(x, names):
  return nnx.State({"w": nnx.Param(x, eager_sharding=False)})


@pytest.mark.parametrize(
  "box", [lambda x, names: x, _in_linen_boxes, _in_nnx_boxes]
)
def test_model_shards_of_one_array_and_of_boxes_are_split(box):
  mesh, gradients = _two_axes(), _of_two()["w"]
  names = (None, "model")
  like = box(PARAMS["w"], names)
  specs = jax.tree.map(lambda _: P(*names), like)
  tx = optax_dist.under_jit(
    optax_dist.sharded(_sgd(), "data"), "data", mesh=mesh, param_specs=specs
  )
  params = optax_dist.states.place(like, mesh, specs)
  state = jax.jit(tx.init)(params)
  updates, state = jax.jit(tx.update)(box(gradients, names), state, params)
  one = _sgd()
  expected, _ = one.update(gradients.mean(axis=0), one.init(PARAMS["w"]))
  (update,) = jax.tree.leaves(updates)
  np.testing.assert_allclose(update, expected, rtol=1e-5)
  (trace,) = jax.tree.leaves(state)
  assert trace.sharding.spec == P("data", None, "model")


def test_replicas_may_be_nested():
  mesh = jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
  inner = optax_dist.sync_replicas(
    optax.sgd(0.5), "ici", replicas_to_aggregate=4
  )
  tx = optax_dist.under_jit(
    optax_dist.local_updates(
      inner, optax.sgd(1.0), "dcn", communication_period=2
    ),
    "dcn",
    mesh=mesh,
    own_params=True,
    inner_axes=("ici",),
  )
  params = optax_dist.states.place(jnp.zeros((2, 3)), mesh, P("dcn"))
  state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
  gradients = np.random.default_rng(0).normal(size=(2, 2, 4, 3))
  gradients = gradients.astype(np.float32)
  for g in gradients:
    updates, state = update(g, state, params)
    params = optax.apply_updates(params, updates)
  expected = -0.5 * gradients.mean(axis=2).sum(axis=0).mean(axis=0)
  np.testing.assert_allclose(params, np.stack([expected] * 2), rtol=1e-5)
  np.testing.assert_allclose(
    optax_dist.center_params(state), expected, rtol=1e-5
  )


def test_invalid_arguments_are_refused():
  tx = optax_dist.under_jit(_sync(), maps.AXIS)
  with pytest.raises(
    ValueError, match=r"mesh has no axis 'data'.*jax.set_mesh"
  ):
    tx.init(PARAMS)
  tx = optax_dist.under_jit(_sync(), maps.AXIS, mesh=maps.mesh(N))
  with pytest.raises(
    ValueError, match=r"updates\['b'\] has shape \(5,\), but must have leading"
  ):
    tx.update(PARAMS, jax.jit(tx.init)(PARAMS), PARAMS)
  tx = optax_dist.under_jit(
    OWN["local_updates"](), maps.AXIS, mesh=maps.mesh(N), own_params=True
  )
  with pytest.raises(ValueError, match=r"params\['b'\] has shape \(5,\)"):
    tx.init(PARAMS)


@jax.numpy_dtype_promotion("standard")  # As MultiSteps needs.
def test_multi_steps_around_it_is_refused_and_works_inside():
  under_jit = lambda tx: optax_dist.under_jit(tx, maps.AXIS, mesh=maps.mesh(N))
  state = jax.eval_shape(optax.MultiSteps(under_jit(_sync()), 2).init, PARAMS)
  with pytest.raises(ValueError, match=r"per_replica\(.*under_jit goes around"):
    optax_dist.states.state_specs(state, maps.AXIS)
  inner = optax.chain(optax_dist.cross_shard(maps.AXIS), optax.sgd(1.0))
  tx = under_jit(
    optax_dist.per_replica(
      optax.MultiSteps(inner, 2), maps.AXIS, "acc_grads", num_replicas=N
    )
  )
  params = jnp.zeros(2)
  state, update = tx.init(params), jax.jit(tx.update)
  gradients = np.arange(4.0 * N, dtype=np.float32).reshape(2, N, 2)
  updates, state = update(gradients[0], state, params)
  np.testing.assert_array_equal(updates, np.zeros(2))
  updates, _ = update(gradients[1], state, params)
  np.testing.assert_allclose(updates, -gradients.mean(axis=(0, 1)), rtol=1e-6)


_METHODS = {
  "top_k": optax_dist.compression.top_k(0.3),
  "quantize": optax_dist.compression.quantize(4),
  "sign": optax_dist.compression.sign(error_feedback=1.0),
  "power_sgd": optax_dist.compression.power_sgd(1),
}
_FLATTENING = {
  "sharded": lambda: optax_dist.sharded(_sgd(), maps.AXIS, num_replicas=2),
  "adasum": lambda: optax_dist.cross_shard(maps.AXIS, reduction="adasum"),
} | {
  name: lambda method=method: optax_dist.cross_shard(
    maps.AXIS, compression=method, num_replicas=2
  )
  for name, method in _METHODS.items()
}


@pairwise.every_value(
  name=list(_FLATTENING), spec=[P("model", None), P(None, "model")]
)
def test_parameters_may_be_sharded_over_an_explicit_axis(name, spec):
  """The numbers of Auto axes, and one sharding of the state from init on."""
  rng = np.random.default_rng(0)
  params = rng.normal(size=(8, 6)).astype(np.float32)
  gradients = rng.normal(size=(3, 2, 8, 6)).astype(np.float32)
  results = []
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), (maps.AXIS, "model"), axis_types=(kind,) * 2)
    tx = optax_dist.under_jit(_FLATTENING[name](), maps.AXIS, mesh=mesh)
    state = tx.init(optax_dist.states.place(params, mesh, spec))
    run, updates = jax.jit(tx.update), []
    types = [jax.tree.map(jax.typeof, state)]
    for g in gradients:
      g = optax_dist.states.place(g, mesh, P(maps.AXIS, *spec))
      update, state = run(g, state, optax_dist.states.place(params, mesh, spec))
      updates.append(update)
      types.append(jax.tree.map(jax.typeof, state))
    results.append((updates, state))
    if kind == AxisType.Explicit:
      assert types == types[:1] * len(types)
      assert run._cache_size() == 1
      assert all(update.sharding.spec == spec for update in updates)
  chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-6)


def test_state_of_a_parameter_is_sharded_like_it():
  mesh = jax.make_mesh(
    (2, 2), (maps.AXIS, "model"), axis_types=(AxisType.Explicit,) * 2
  )
  params = optax_dist.states.place(
    {"even": np.zeros((4, 4)), "odd": np.zeros((2, 5))},
    mesh,
    {"even": P(None, "model"), "odd": P("model", None)},
  )
  tx = optax_dist.under_jit(_FLATTENING["sharded"](), maps.AXIS, mesh=mesh)
  trace = tx.init(params).inner_state[0].trace
  assert trace["even"].value.sharding.spec == P(maps.AXIS, None, "model")
  # A part of one row can't be divided by 2.
  assert trace["odd"].value.sharding.spec == P(maps.AXIS, None, None)
  odd = params["odd"]
  g = optax_dist.states.place(np.ones((2, 2, 5)), mesh, P(maps.AXIS, "model"))
  updates = jax.jit(tx.update)(g, tx.init(odd), odd)[0]
  assert updates.sharding.spec == odd.sharding.spec
  tx = optax_dist.under_jit(_FLATTENING["power_sgd"](), maps.AXIS, mesh=mesh)
  residual = tx.init(params).replica.value.residual
  assert residual["even"].sharding.spec == P(maps.AXIS, None, "model")
