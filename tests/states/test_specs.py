"""Tests of which parts of a state belong to one replica, through wrappers."""

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
PARAMS = {"w": np.ones(2, np.float32), "frozen": np.ones(2, np.float32)}


def _tx(inner=None):
  return optax_dist.sync_replicas(
    inner or optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=N + 1,
    total_num_replicas=N,
  )


def _sharded(inner):
  return optax_dist.sharded(inner, maps.AXIS, num_replicas=N)


WRAPPERS = {
  "alone": _tx,
  "chain": lambda: optax.chain(optax.clip(1.0), _tx()),
  "inject_hyperparams": lambda: optax.inject_hyperparams(
    lambda learning_rate: _tx(optax.sgd(learning_rate))
  )(learning_rate=0.5),
  "multi_steps": lambda: optax_dist.per_replica(
    optax.MultiSteps(_tx(), 2), maps.AXIS, "acc_grads", num_replicas=N
  ),
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
  specs = by_leaf(optax_dist.states.state_specs(state, maps.AXIS))
  assert specs == [P(maps.AXIS) if own else P() for own in marks]
  axes = by_leaf(optax_dist.states.state_axes(state))
  assert axes == [0 if own else None for own in marks]
  for leaf, own in zip(jax.tree.leaves(state), marks, strict=True):
    assert not own or leaf.shape[0] == N


def test_wrappers_with_state_of_each_replica_are_named():
  """JAX would say that out_axes or out_specs are wrong, but not why."""
  for wrapped, remedy in (
    (optax.MultiSteps(_tx(), 2), r"per_replica\(optax.MultiSteps"),
    (optax.apply_if_finite(_tx(), 2), "Put it inside"),
  ):
    tx = optax.chain(optax.clip(1.0), wrapped)
    state = jax.eval_shape(tx.init, PARAMS)
    for of in (
      optax_dist.states.state_axes,
      lambda state: optax_dist.states.state_specs(state, maps.AXIS),
    ):
      with pytest.raises(ValueError, match=remedy):
        of(state)
  inside = _tx(optax.apply_if_finite(optax.sgd(1.0), 2)).init(PARAMS)
  assert (
    optax_dist.states.state_axes(inside).inner_state.total_notfinite is None
  )


@pairwise.every_value(
  map_name=["vmap", "pmap", "shard_map_vma"],
  wrapper=sorted(WRAPPERS.keys() - {"multi_steps"}),
)
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


def test_specs_name_several_axes_and_none_for_shared_values():
  state = _tx().init(PARAMS)
  specs = optax_dist.states.state_specs(state, ["a", "b"])
  assert specs.replica.value.local_step == P(("a", "b"))
  assert optax_dist.states.state_specs({"x": 1.0, "n": None}, "a") == {
    "x": P(),
    "n": None,
  }
  with pytest.raises(ValueError, match="`axis_name` must hold"):
    optax_dist.states.state_specs(state, ())


MODEL = {
  "w": jax.ShapeDtypeStruct((6, 4), jnp.float32),
  "b": jax.ShapeDtypeStruct((4,), jnp.float32),
}
MODEL_SPECS = {"w": P(None, "model"), "b": P("model")}


def _own(spec):
  return P(maps.AXIS, *spec)


class TestParamSpecs:
  """State shaped like a parameter is sharded like it."""

  def test_specs_of_sync_replicas_follow_the_parameters(self):
    tx = optax_dist.sync_replicas(
      optax.chain(optax.clip(1.0), optax.adam(0.1)),
      maps.AXIS,
      replicas_to_aggregate=N,
      total_num_replicas=N,
      variable_averages=0.9,
      variables_to_average={"w": True, "b": False},
    )
    state = jax.eval_shape(tx.init, MODEL)
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=MODEL_SPECS
    )
    inner, ema = specs.inner_state
    adam = inner[1][0]
    assert adam.mu == adam.nu == MODEL_SPECS
    assert adam.count == specs.global_step == P()
    assert ema.averages == {
      "w": MODEL_SPECS["w"],
      "b": optax.MaskedNode(),
    }
    own = specs.replica.value
    assert own.gradient_sum == jax.tree.map(
      _own, MODEL_SPECS, is_leaf=lambda x: isinstance(x, P)
    )
    assert own.local_step == P(maps.AXIS)
    assert jax.tree.structure(state) == jax.tree.structure(
      specs, is_leaf=lambda x: isinstance(x, P)
    )

  def test_masked_leaves_have_no_spec(self):
    tx = optax.masked(optax.trace(0.9), {"w": True, "b": False})
    specs = optax_dist.states.state_specs(
      jax.eval_shape(tx.init, MODEL), maps.AXIS, param_specs=MODEL_SPECS
    )
    assert specs.inner_state.trace["w"] == MODEL_SPECS["w"]

  def test_counters_beside_one_array_are_replicated(self):
    state = jax.eval_shape(optax.adam(0.1).init, MODEL["w"])
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=P("model", None)
    )
    assert specs[0].mu == P("model", None)
    assert specs[0].count == P()

  def test_factors_need_the_parameters(self):
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    state = jax.eval_shape(tx.init, MODEL)
    with pytest.raises(ValueError, match=r"different shapes.*give `params`"):
      optax_dist.states.state_specs(state, maps.AXIS, param_specs=MODEL_SPECS)
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=MODEL_SPECS, params=MODEL
    )
    assert specs.v_row["w"] == specs.v_col["w"] == specs.v["w"] == P()
    assert specs.v["b"] == MODEL_SPECS["b"]

  def test_a_prefix_needs_the_parameters(self):
    state = jax.eval_shape(optax.trace(0.9).init, MODEL)
    with pytest.raises(ValueError, match="give `params`"):
      optax_dist.states.state_specs(state, maps.AXIS, param_specs=P("model"))
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=P("model"), params=MODEL
    )
    assert specs.trace == {"w": P("model"), "b": P("model")}

  def test_sum_of_sparse_gradients_has_specs(self):
    tx = optax_dist.sync_replicas(
      optax.sgd(0.1),
      maps.AXIS,
      replicas_to_aggregate=N,
      total_num_replicas=N,
      sparse_capacity={"w": 3, "b": None},
    )
    state = jax.eval_shape(tx.init, MODEL)
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=MODEL_SPECS
    )
    total = specs.replica.value.gradient_sum["w"]
    assert total.values == P(maps.AXIS, None, "model")
    assert total.indices == total.touches == P(maps.AXIS)
    with pytest.raises(ValueError, match="can't be sharded by rows"):
      optax_dist.states.state_specs(
        state, maps.AXIS, param_specs={"w": P("model"), "b": P()}
      )

  @pytest.mark.parametrize("after", [(), (optax.clip(1.0),)])
  def test_shards_of_one_array_have_specs(self, after):
    tx = optax.chain(_sharded(optax.adam(0.1)), *after)
    state = jax.eval_shape(tx.init, MODEL["w"])
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=P(None, "model")
    )
    adam = specs[0].inner_state[0]
    assert adam.mu == adam.nu
    assert adam.mu == optax_dist.PerReplica(P(maps.AXIS, None, "model"))
    assert adam.count == P()

  def test_state_of_each_replica_for_one_array_has_specs(self):
    tx = optax.chain(
      optax_dist.per_replica(optax.trace(0.9), maps.AXIS, num_replicas=N),
      optax_dist.cross_shard(maps.AXIS),
    )
    state = jax.eval_shape(tx.init, MODEL["w"])
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=P(None, "model")
    )
    own = specs[0].value
    assert own.value.trace == P(maps.AXIS, None, "model")
    assert own.local_step == P(maps.AXIS)

  def test_invalid_specs_are_refused(self):
    with pytest.raises(ValueError, match="must be a pytree of PartitionSpec"):
      optax_dist.states.state_specs({}, maps.AXIS, param_specs={"w": "model"})


class TestBoxes:
  """Flax keeps a parameter's axes beside it."""

  def test_linen_boxes_have_specs(self):
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    net = nn.Dense(4, kernel_init=kernel)
    params = net.init(jax.random.key(0), jnp.ones((1, 6)))["params"]
    state = _tx(optax.trace(0.9)).init(params)
    specs = optax_dist.states.state_specs(
      state, maps.AXIS, param_specs=nn.get_partition_spec(params)
    )
    assert specs.inner_state.trace["kernel"].value == P(None, "model")
    assert specs.inner_state.trace["bias"] == P()
    own = specs.replica.value.gradient_sum
    assert own["kernel"].value == P(maps.AXIS, None, "model")
    mesh = jax.make_mesh(
      (N, 2), (maps.AXIS, "model"), axis_types=(AxisType.Auto,) * 2
    )
    placed = optax_dist.states.place(state, mesh, specs)
    trace = placed.inner_state.trace["kernel"].value
    assert trace.sharding.spec == P(None, "model")

  def test_sum_of_sparse_gradients_in_a_linen_box_has_specs(self):
    params = {"w": nn.Partitioned(jnp.ones((4, 6)), (None, "model"))}
    tx = optax_dist.sync_replicas(
      optax.sgd(0.1),
      maps.AXIS,
      replicas_to_aggregate=N,
      total_num_replicas=N,
      sparse_capacity=jax.tree.map(lambda _: 3, params),
    )
    specs = optax_dist.states.state_specs(
      jax.eval_shape(tx.init, params),
      maps.AXIS,
      param_specs=nn.get_partition_spec(params),
    )
    total = specs.replica.value.gradient_sum["w"].value
    assert total.values == P(maps.AXIS, None, "model")
    assert total.indices == P(maps.AXIS)

  def test_nnx_variables_have_specs(self):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    kernel = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    with jax.set_mesh(mesh):
      net = nnx.Linear(6, 4, kernel_init=kernel, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(net, _tx(optax.trace(0.9)), wrt=nnx.Param)
    of_params = nnx.get_partition_spec(nnx.state(net, nnx.Param))
    specs = optax_dist.states.state_specs(
      optimizer, maps.AXIS, param_specs=of_params
    )
    trace = specs.opt_state.inner_state.trace
    assert trace["kernel"].get_raw_value() == P(None, "model")
    assert trace["bias"].get_raw_value() == P()
    own = specs.opt_state.replica.value.gradient_sum
    assert own["kernel"].get_raw_value() == P(maps.AXIS, None, "model")


def _nested():
  """DiLoCo over "dcn", each replica of which is four synchronous ones."""
  inner = optax_dist.sync_replicas(
    optax.sgd(0.5),
    "ici",
    replicas_to_aggregate=3,
    total_num_replicas=4,
    model_axes=(),
  )
  return optax_dist.local_updates(
    inner,
    optax.sgd(1.0),
    "dcn",
    num_replicas=2,
    communication_period=2,
    model_axes=(),
  )


def _over_mesh(check_vma):
  def run(step, params, state, args):
    mesh = jax.make_mesh(
      (2, 4), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2
    )
    specs = optax_dist.states.state_specs(state, "dcn", inner_axes=["ici"])

    def body(params, state, args):
      params, state = step(params[0], state, *(x[0, 0] for x in args))
      return params[None], state

    mapped = jax.shard_map(
      body,
      mesh=mesh,
      in_specs=(P("dcn"), specs, P("dcn", "ici")),
      out_specs=(P("dcn"), specs),
      check_vma=check_vma,
    )
    state = optax_dist.states.place(state, mesh, specs)
    return jax.jit(mapped)(params, state, args)

  return run


def _over_vmaps(step, params, state, args):
  inner = optax_dist.states.state_axes(state, depth=1)
  outer = optax_dist.states.state_axes(state)
  step = jax.vmap(
    step, in_axes=(None, inner, 0, 0), out_axes=(None, inner), axis_name="ici"
  )
  step = jax.vmap(
    step, in_axes=(0, outer, 0, 0), out_axes=(0, outer), axis_name="dcn"
  )
  return jax.jit(step)(params, state, *args)


@pytest.mark.parametrize(
  "over",
  [_over_mesh(False), _over_mesh(True), _over_vmaps],
  ids=["shard_map", "shard_map_vma", "vmaps"],
)
def test_nested_replicas_have_specs(over):
  """The numbers of both levels, and where their state lies."""
  tx = _nested()
  start = jnp.zeros(3)
  state = tx.init(start)
  gradients = np.random.default_rng(0).normal(size=(4, 2, 4, 3))
  gradients = gradients.astype(np.float32)
  arrived = np.tile(np.arange(4) != 3, (2, 1))

  def step(params, state, gradient, arrived):
    updates, state = tx.update(gradient, state, params, arrived=arrived)
    return optax.apply_updates(params, updates), state

  params = jnp.stack([start] * 2)
  expected = np.zeros((2, 3), np.float32)
  for t in range(4):
    params, state = over(step, params, state, (gradients[t], arrived))
    # Three of each four count; every other tick the two meet.
    expected = expected - 0.5 * gradients[t, :, :3].mean(axis=1)
    if t % 2:
      expected = np.tile(expected.mean(axis=0), (2, 1))
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
  sync = state.replica.value.inner_state
  assert sync.global_step.tolist() == [4, 4]
  accepted = sync.replica.value.accepted
  assert accepted.tolist() == [[4, 4, 4, 0]] * 2
  assert sync.replica.value.gradient_sum.shape == (2, 4, 3)


def test_nested_replicas_need_inner_axes():
  state = jax.eval_shape(_nested().init, jnp.zeros(3))
  with pytest.raises(ValueError, match=r"give the axes .* `inner_axes`"):
    optax_dist.states.state_specs(state, "dcn")
  specs = optax_dist.states.state_specs(
    state, "dcn", inner_axes=["ici"], param_specs=P("model")
  )
  assert specs.replica.value.local_step == P("dcn")
  own = specs.replica.value.inner_state.replica.value
  assert own.local_step == P("dcn", "ici")
  assert own.gradient_sum == P("dcn", "ici", "model")
  assert specs.center == P("model")


def test_state_is_created_in_its_final_sharding():
  mesh = maps.mesh(N)
  tx = _tx(optax.adam(0.1))
  specs = optax_dist.states.state_specs(
    jax.eval_shape(tx.init, PARAMS), maps.AXIS
  )
  with jax.set_mesh(mesh):
    state = jax.jit(tx.init, out_shardings=specs)(PARAMS)
  total = state.replica.value.gradient_sum["w"]
  assert {x.data.shape for x in total.addressable_shards} == {(1, 2)}
  assert state.inner_state[0].mu["w"].sharding.is_fully_replicated
