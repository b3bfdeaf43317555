"""Tests of the whole training step, against the same written with shard_map."""

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


def _by_hand(tx, own, mesh):
  """Yields parameters and losses of a step that is written with shard_map."""
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
  for batch in _batches():
    params, state, value = run(params, state, batch)
    yield params, value


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_train_step_has_the_numbers_of_a_step_written_with_shard_map(
  name, explicit
):
  tx, own = CASES[name]
  mesh = maps.mesh(N)
  step = optax_dist.train_step(_loss, tx, maps.mesh(N, explicit), AXIS)
  start = _params()
  params, state = step.init(start)
  for batch, (expected, loss) in zip(
    _batches(), _by_hand(tx, own, mesh), strict=True
  ):
    params, state, value = step(params, state, batch)
    chex.assert_trees_all_equal(*jax.device_get((params, expected)))
    assert float(value) == float(loss)
  spec = P(AXIS) if own else P()
  placed = jax.NamedSharding(maps.mesh(N, explicit), spec)
  for x in jax.tree.leaves(params):
    assert x.sharding.is_equivalent_to(placed, x.ndim)
  chex.assert_trees_all_equal(start, _params())


def test_parameters_given_to_init_are_not_donated():
  tx, _ = CASES["cross_shard"]
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  start = optax_dist.states.place(_params(), maps.mesh(N), P())
  params, state = step.init(start)
  step(params, state, _batches()[0])
  chex.assert_trees_all_equal(start, _params())
  assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("explicit", [False, True])
def test_arguments_of_each_replica(explicit):
  tx, _ = CASES["sync_replicas"]
  step = optax_dist.train_step(_loss, tx, maps.mesh(N, explicit), AXIS)
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
    _batches(), _by_hand(tx, False, maps.mesh(N)), strict=True
  ):
    params, state, _ = step(params, state, batch)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)


def test_what_the_loss_returns_besides_is_averaged():
  tx, _ = CASES["cross_shard"]

  def loss(params, batch):
    return _loss(params, batch), {"first": batch["x"][0, 0]}

  step = optax_dist.train_step(loss, tx, maps.mesh(N), AXIS, has_aux=True)
  batch = _batches()[0]
  *_, (_, aux) = step(*step.init(_params()), batch)
  np.testing.assert_allclose(aux["first"], batch["x"][::2, 0].mean(), rtol=1e-6)


def test_the_module_of_a_model():
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


def test_errors():
  tx, _ = CASES["cross_shard"]
  with pytest.raises(ValueError, match="no axis 'replicas'; it has"):
    optax_dist.train_step(_loss, tx, maps.mesh(N), "replicas")
  step = optax_dist.train_step(_loss, tx, maps.mesh(N), AXIS)
  batch = {"x": np.zeros((N + 1, 3)), "y": np.zeros((N, 4))}
  with pytest.raises(ValueError, match=r"\['x'\] has shape \(5, 3\).* of 4"):
    step(*step.init(_params()), batch)
