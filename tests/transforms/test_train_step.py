"""Tests of the whole training step, against the same written with shard_map."""

import functools

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
TICKS = 3
AXIS = maps.AXIS
INNER = optax.sgd(0.1, momentum=0.9)

#: By name: the transformation, and whether each replica has its own parameters.
CASES = {
  "cross_shard": (optax.chain(optax_dist.cross_shard(AXIS), INNER), False),
  "sync_replicas": (
    optax_dist.sync_replicas(INNER, AXIS, replicas_to_aggregate=3),
    False,
  ),
  "sharded": (optax_dist.sharded(INNER, AXIS), False),
  "elastic_average": (
    optax_dist.elastic_average(
      INNER, AXIS, communication_period=2, learning_rate=0.1
    ),
    True,
  ),
  "diloco": (
    optax_dist.diloco(
      INNER, AXIS, communication_period=2, outer_learning_rate=0.7
    ),
    True,
  ),
}


def _params():
  draw = np.random.default_rng(0).normal
  return {
    "w": draw(size=(3, 4)).astype(np.float32),
    "b": np.zeros(4, np.float32),
  }


def _loss(params, batch):
  # A loop from zeros, as in many losses.
  start = jnp.zeros((batch["x"].shape[0], 4))
  out, _ = jax.lax.scan(
    lambda carry, row: (carry + row, None),
    start,
    jnp.stack([batch["x"] @ params["w"], params["b"][None] + start]),
  )
  return jnp.mean((out - batch["y"]) ** 2)


def _batches():
  rng = np.random.default_rng(1)
  return [
    {
      "x": rng.normal(size=(2 * N, 3)).astype(np.float32),
      "y": rng.normal(size=(2 * N, 4)).astype(np.float32),
    }
    for _ in range(TICKS)
  ]


@functools.cache
def _step(name, explicit=False):
  tx, _ = CASES[name]
  return optax_dist.train_step(_loss, tx, maps.mesh(N, explicit), AXIS)


@functools.cache
def _by_hand(name):
  """Parameters and losses of a step that is written with shard_map."""
  (tx, own), mesh = CASES[name], maps.mesh(N)
  params = jax.tree.map(jnp.asarray, _params())
  with jax.set_mesh(mesh):
    state = tx.init(params)
  specs = optax_dist.states.state_specs(state, AXIS)
  if own:
    params = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  of_params = P(AXIS) if own else P()

  def step(params, state, batch):
    if own:
      params = jax.tree.map(lambda x: x[0], params)
    value, grads = jax.value_and_grad(_loss)(params, batch)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if own:
      params = jax.tree.map(lambda x: x[None], params)
    return params, state, jax.lax.pmean(value, AXIS)

  run = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(of_params, specs, P(AXIS)),
      out_specs=(of_params, specs, P()),
      check_vma=False,
    )
  )
  results = []
  for batch in _batches():
    params, state, value = run(params, state, batch)
    results.append((params, value))
  return results


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_train_step_has_the_numbers_of_a_step_written_with_shard_map(
  name, explicit
):
  step = _step(name, explicit)
  start = _params()
  params, state = step.init(start)
  for batch, (expected, loss) in zip(_batches(), _by_hand(name), strict=True):
    params, state, value = step(params, state, batch)
    chex.assert_trees_all_equal(*jax.device_get((params, expected)))
    assert float(value) == float(loss)
  spec = P(AXIS) if CASES[name][1] else P()
  placed = jax.NamedSharding(maps.mesh(N, explicit), spec)
  for x in jax.tree.leaves(params):
    assert x.sharding.is_equivalent_to(placed, x.ndim)
  chex.assert_trees_all_equal(start, _params())


def test_parameters_given_to_init_are_not_donated():
  step = _step("cross_shard")
  start = optax_dist.states.place(_params(), maps.mesh(N), P())
  params, state = step.init(start)
  step(params, state, _batches()[0])
  chex.assert_trees_all_equal(start, _params())
  assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("explicit", [False, True])
def test_arguments_of_each_replica_are_passed_on(explicit):
  step = _step("sync_replicas", explicit)
  params, state = step.init(_params())
  arrived = optax_dist.PerReplica(jnp.arange(N) < 2)
  params, state, _ = step(params, state, _batches()[0], arrived=arrived)
  chex.assert_trees_all_equal(params, _params())
  assert state.replica.value.absent.tolist() == [0, 0, 1, 1]


def test_further_axes_are_left_to_the_compiler():
  tx, _ = CASES["cross_shard"]
  mesh = jax.make_mesh((N, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
  step = optax_dist.train_step(_loss, tx, mesh, AXIS)
  params, state = step.init(_params())
  for batch, (expected, _) in zip(
    _batches(), _by_hand("cross_shard"), strict=True
  ):
    params, state, _ = step(params, state, batch)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)


@pytest.mark.parametrize("explicit", [False, True])
def test_auxiliary_outputs_are_returned_for_each_replica(explicit):
  tx, _ = CASES["cross_shard"]

  def loss(params, batch):
    aux = {"first": batch["x"][0, 0], "positive": (batch["y"] > 0).sum()}
    return _loss(params, batch), aux

  step = optax_dist.train_step(
    loss, tx, maps.mesh(N, explicit), AXIS, has_aux=True
  )
  batch = _batches()[0]
  *_, (value, aux) = step(*step.init(_params()), batch)
  np.testing.assert_array_equal(aux["first"], batch["x"][::2, 0])
  # The caller chooses the reduction.
  assert aux["positive"].sum() == (batch["y"] > 0).sum()
  np.testing.assert_allclose(value, _loss(_params(), batch), rtol=1e-6)


def _with_a_nan(rows, batch):
  return batch | {
    "x": np.where(np.isin(np.arange(2 * N), rows)[:, None], np.nan, batch["x"])
  }


@pytest.mark.parametrize("name", CASES)
def test_mean_loss_ignores_nonfinite_replicas(name):
  """NaN only if it reached the parameters, or if there is no other replica."""
  _, own = CASES[name]
  step = _step(name)
  params, state = step.init(_params())
  batch = _batches()[0]
  rows_of = lambda i: jax.tree.map(lambda x: x[2 * i : 2 * i + 2], batch)
  good = [_loss(_params(), rows_of(i)) for i in (0, 2, 3)]
  params, state, value = step(params, state, _with_a_nan([2], batch))
  dropped = own or name == "sync_replicas"
  expected = np.mean(good) if dropped else np.nan
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  *_, value = step(params, state, _with_a_nan(range(2 * N), batch))
  assert np.isnan(value)


_BY_LOSS = {
  # The rate is so large that the loss grows, and the rate falls.
  "reduce_on_plateau": lambda: optax.chain(
    optax.sgd(3.0), optax.contrib.reduce_on_plateau(0.1, patience=1)
  ),
  "polyak_sgd": optax.polyak_sgd,
  "lbfgs": optax.lbfgs,
}


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", _BY_LOSS)
def test_an_optimizer_gets_the_mean_loss_and_what_a_line_search_needs(name):
  """The numbers of one device with the whole batch."""
  inner, batch = _BY_LOSS[name](), _batches()[0]
  mean_loss = lambda params: _loss(params, batch)

  @jax.jit
  def alone(params, state):
    value, grads = jax.value_and_grad(mean_loss)(params)
    updates, state = inner.update(
      grads, state, params, value=value, grad=grads, value_fn=mean_loss
    )
    return optax.apply_updates(params, updates), state

  tx = optax.chain(optax_dist.cross_shard(AXIS), inner)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  expected = _params(), inner.init(_params())
  params, state = step.init(_params())
  for _ in range(4):
    expected = alone(*expected)
    params, state, _ = step(params, state, batch)
  chex.assert_trees_all_close(params, expected[0], rtol=1e-3)


def test_a_line_search_needs_common_parameters():
  tx = optax_dist.diloco(optax.lbfgs(), AXIS, communication_period=2)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  with pytest.raises(ValueError, match="train_step: `tx` has a line search"):
    step(*step.init(_params()), _batches()[0])


@pairwise.every_value(name=list(CASES), explicit=[False, True])
def test_train_step_compiles_once_even_for_unplaced_arrays(name, explicit):
  tx, _ = CASES[name]
  compiled = []

  def loss(params, batch):
    compiled.append(True)
    return _loss(params, batch)

  step = optax_dist.train_step(loss, tx, maps.mesh(N, explicit), AXIS)
  first = step.init(_params())
  unplaced = jax.device_get(first)
  replicated = optax_dist.states.place(unplaced, maps.mesh(N, explicit), P())
  results = []
  for kept in (first, unplaced, replicated):
    for batch in _batches():
      *kept, value = step(*kept, batch)
    results.append((kept, value))
  assert len(compiled) == 1
  chex.assert_trees_all_equal(*jax.device_get(results))


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_that_is_a_python_number_compiles_no_second_step(name):
  compiled = []

  def loss(params, batch):
    compiled.append(True)
    return jnp.mean((batch["x"] @ params["w"]) ** 2) * params["scale"]

  step = optax_dist.train_step(loss, CASES[name][0], maps.mesh(N), AXIS)
  kept = step.init({"w": _params()["w"], "scale": 0.5})
  for batch in _batches():
    *kept, _ = step(*kept, batch)
  assert len(compiled) == 1


@pytest.mark.parametrize("name", ["cross_shard", "sharded", "diloco"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_stay_sharded_over_further_axes(name, kind):
  tx, own = CASES[name]
  mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(kind,) * 2)
  loss = lambda params, batch: jnp.mean(
    (batch["x"] @ params["w"] + params["b"][None]) ** 2
  )
  step = optax_dist.train_step(loss, tx, mesh, AXIS)
  specs = {"w": P(None, "model"), "b": P("model")}
  kept = step.init(optax_dist.states.place(_params(), mesh, specs))
  replica = (AXIS,) if own else ()
  start = jax.tree.map(lambda x: x.sharding.spec, kept)
  assert start[0] == {
    "w": P(*replica, None, "model"),
    "b": P(*replica, "model"),
  }
  (trace,) = optax.tree.get_all_with_path(start[1], "trace")[:1]
  of_trace = jax.tree.leaves(trace[1], is_leaf=lambda x: isinstance(x, P))
  assert all("model" in spec for spec in of_trace)
  for batch in _batches():
    *kept, _ = step(*kept, batch)
  assert jax.tree.map(lambda x: x.sharding.spec, tuple(kept)) == start


def test_parameters_without_their_replica_axis_are_refused():
  step = _step("diloco")
  _, state = step.init(_params())
  message = r"params\['b'\] has shape \(4,\).*|params\['w'\] has shape \(3, 4\)"
  with pytest.raises(ValueError, match=message):
    step(_params(), state, _batches()[0])


def test_center_can_be_put_back_into_an_nnx_module():
  nnx = pytest.importorskip("flax.nnx")
  model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)

  def loss(params, batch):
    out = nnx.merge(graph, params)(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2)

  tx, _ = CASES["diloco"]
  step = optax_dist.train_step(loss, tx, maps.mesh(N), AXIS)
  params, state = step.init(params)
  losses = []
  for _ in range(4):
    params, state, value = step(params, state, _batches()[0])
    losses.append(float(value))
  assert losses[-1] < losses[0]
  nnx.update(model, optax_dist.center_params(state))
  assert model.kernel.shape == (3, 4)


def test_conflicting_mesh_of_set_mesh_is_refused():
  step = _step("cross_shard")
  kept = step.init(_params())
  with jax.set_mesh(maps.mesh(2)):
    with pytest.raises(ValueError, match=r"jax\.set_mesh has another mesh"):
      step.init(_params())
    with pytest.raises(ValueError, match=r"jax\.set_mesh has another mesh"):
      step(*kept, _batches()[0])
  with jax.set_mesh(maps.mesh(N)):
    step(*kept, _batches()[0])


def test_under_jit_inside_train_step_is_refused():
  tx = optax_dist.under_jit(CASES["cross_shard"][0], AXIS, mesh=maps.mesh(N))
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  with pytest.raises(ValueError, match="under_jit: it is in a map over axis"):
    step.init(_params())


def test_replicas_may_be_nested():
  mesh = jax.make_mesh((2, 2), (AXIS, "ici"), axis_types=(AxisType.Auto,) * 2)
  inner = optax_dist.sync_replicas(INNER, "ici", replicas_to_aggregate=2)
  tx = optax_dist.diloco(inner, AXIS, communication_period=2)
  step = optax_dist.train_step(_loss, tx, mesh, (AXIS, "ici"))
  with pytest.raises(ValueError, match=r"replicas that consist.*inner_axes"):
    step.init(_params())


def test_state_that_changes_its_structure_is_refused():
  tx = optax.GradientTransformation(
    lambda _: (), lambda updates, state, params=None: (updates, (updates,))
  )
  tx = optax.chain(optax_dist.cross_shard(AXIS), tx)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  with pytest.raises(ValueError, match="a state of another structure"):
    step(*step.init(_params()), _batches()[0])


def test_invalid_arguments_are_refused():
  tx, _ = CASES["cross_shard"]
  with pytest.raises(ValueError, match="no axis 'replicas'; it has"):
    optax_dist.train_step(_loss, tx, maps.mesh(N), "replicas")
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  batch = {"x": np.zeros((N + 1, 3)), "y": np.zeros((N, 4))}
  with pytest.raises(ValueError, match=r"\['x'\] has shape \(5, 3\).* of 4"):
    step(*step.init(_params()), batch)
