"""A nonfinite replica must not spoil the others in any exchange."""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist

N = 4
BAD = 2

ARGUMENTS = {
  "elastic": ("elastic_average", {"rho": 0.0}),
  "elastic_same_point": (
    "elastic_average",
    {"communication_period": 1, "rho": None, "exchange": "same_point"},
  ),
  "local": ("local_updates", {}),
  "streaming": ("streaming_updates", {"fragments": 2, "delay": 1}),
}


def _make(kind, **kwargs):
  name, arguments = ARGUMENTS[kind]
  return every_transform.make(name, optax.sgd(0.1), N, **arguments | kwargs)


every_kind = pytest.mark.parametrize("kind", ARGUMENTS)


def _train(map_name, tx, bad, steps=6):
  start = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
  state = tx.init(start)

  def step(state, params, g):
    updates, state = tx.update(g, state, params)
    return optax.apply_updates(params, updates), state

  run = maps.stepper(map_name, step, state, N)
  params = jax.tree.map(lambda x: np.stack([x] * N), start)
  rng = np.random.default_rng(0)
  for t in range(steps):
    g = jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(np.float32), params
    )
    if t == 1:
      g["b"][BAD, 1] = bad
    params, state = run(state, params, g)
  return params, state


@every_kind
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_other_replicas_and_the_center_stay_finite(kind, bad):
  params, state = _train("vmap", _make(kind), bad)
  others = np.arange(N) != BAD
  for x in jax.tree.leaves(params):
    assert np.isfinite(x[others]).all()
  for x in jax.tree.leaves(optax_dist.center_params(state)):
    assert np.isfinite(x).all()
  dropped = np.asarray(optax.tree.get(state, "dropped_nonfinite"))
  assert dropped[BAD] > 0
  np.testing.assert_array_equal(dropped[others], 0)


@every_kind
def test_without_the_check_a_nan_reaches_the_center(kind):
  tx = _make(kind, reject_nonfinite=False)
  _, state = _train("vmap", tx, np.nan)
  center = jax.tree.leaves(optax_dist.center_params(state))
  assert not all(np.isfinite(x).all() for x in center)


@pairwise.every_value(map_name=maps.NAMES, kind=["elastic", "local"])
def test_the_center_is_the_same_in_every_map(map_name, kind):
  _, expected = _train("vmap", _make(kind), np.nan, steps=4)
  _, state = _train(map_name, _make(kind), np.nan, steps=4)
  for x, y in zip(
    jax.tree.leaves(optax_dist.center_params(state)),
    jax.tree.leaves(optax_dist.center_params(expected)),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_mean_is_over_finite_replicas():
  tx = optax_dist.local_sgd(
    optax.sgd(1.0), maps.AXIS, num_replicas=N, communication_period=1
  )
  state = tx.init(np.zeros(2, np.float32))

  def step(state, params, g):
    return tx.update(g, state, params)

  run = maps.stepper("vmap", step, state, N)
  g = np.float32([[-1, -1], [-2, -2], [np.nan, 0], [-6, -6]])
  updates, state = run(state, np.zeros((N, 2), np.float32), g)
  # All go on from there, also the one whose step was not finite.
  np.testing.assert_array_equal(updates, 3.0)
  np.testing.assert_array_equal(optax_dist.center_params(state), 3.0)


def test_a_round_without_a_finite_replica_moves_nothing():
  tx = _make("local")
  state = tx.init(np.ones(2, np.float32))
  run = maps.stepper(
    "vmap", lambda state, p, g: tx.update(g, state, p), state, N
  )
  bad = np.full((N, 2), np.nan, np.float32)
  for _ in range(2):
    _, state = run(state, np.ones((N, 2), np.float32), bad)
  np.testing.assert_array_equal(optax_dist.center_params(state), 1.0)


@pytest.mark.parametrize("kind", ["elastic", "local"])
@pytest.mark.parametrize("check_vma", [False, True])
def test_all_shards_of_a_replica_decide_alike(kind, check_vma):
  """Each replica's parameter is sharded over a second axis."""
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  P = jax.sharding.PartitionSpec
  make = optax_dist.local_sgd if kind == "local" else optax_dist.elastic_average
  extra = {} if kind == "local" else {"rho": 0.0, "moving_rate": 0.25}
  if not check_vma:
    extra["model_axes"] = "model"
  tx = make(
    optax.sgd(1.0), "data", num_replicas=2, communication_period=1, **extra
  )
  state = tx.init(jnp.zeros(4))
  specs = jax.tree.map(
    lambda x, spec: (
      spec if x.ndim < 1 or x.shape[-1] != 4 else P(*spec, "model")
    ),
    state,
    optax_dist.states.state_specs(state, "data"),
  )

  def step(params, state, g):
    updates, state = tx.update(g[0], state, params[0])
    return updates[None], state

  run = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P("data", "model"), specs, P("data", "model")),
      out_specs=(P("data", "model"), specs),
      check_vma=check_vma,
    )
  )
  g = np.full((2, 4), -4, np.float32)
  g[1, 3] = np.nan
  _, state = run(np.zeros((2, 4), np.float32), state, g)
  moved = 4.0 if kind == "local" else 1.0
  np.testing.assert_array_equal(optax_dist.center_params(state), [moved] * 4)
  dropped = optax.tree.get(state, "dropped_nonfinite")
  np.testing.assert_array_equal(dropped, [0, 1])
