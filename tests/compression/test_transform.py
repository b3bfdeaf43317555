"""cross_shard and local_updates with a compression, under each map."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
import scattered

import optax_dist
from optax_dist import compression

SIZE = 4
METHODS = {
  "top_k": compression.top_k(0.3, bits=2, error_feedback=0.9),
  "power_sgd": compression.power_sgd(1),
}


def _gradients(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=(SIZE, *shape)).astype(np.float32)
  return {"b": normal(5), "w": normal(6, 8)}


def _steps(tx, map_name, params):
  state = tx.init(params)
  run = maps.stepper(map_name, lambda s, g: tx.update(g, s), state, SIZE)
  out = []
  for i in range(3):
    result, state = run(state, _gradients(i))
    out.append(result)
  return out, state


@functools.cache
def _expected(name, factor):
  """By the method itself, for replicas as rows."""
  method = METHODS[name]

  def run(*gradients):
    state, out = method.init(gradients[0]), []
    for gradient in gradients:
      result, state = method.reduce(gradient, state, ("data",))
      out.append(jax.tree.map(lambda x: x * factor, result))
    return out

  gradients = [_gradients(i) for i in range(3)]
  return jax.jit(jax.vmap(run, axis_name="data"))(*gradients)


# test_reduce.py has the methods in the other maps.
@pytest.mark.parametrize(
  ("map_name", "name"), [("shard_map", "top_k"), ("shard_map_vma", "power_sgd")]
)
def test_cross_shard_applies_the_method(map_name, name):
  tx = optax_dist.cross_shard(
    maps.AXIS, compression=METHODS[name], num_replicas=SIZE
  )
  params = jax.tree.map(lambda x: x[0], _gradients())
  got, state = _steps(tx, map_name, params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
    got,
    _expected(name, 1.0),
  )
  assert int(state.num_updates) == 3
  assert state.replica.value.residual["w"].shape == (SIZE, 6, 8)


def test_sum_is_the_mean_times_the_number_of_replicas():
  tx = optax_dist.cross_shard(
    "data",
    reduction="sum",
    compression=METHODS["top_k"],
    num_replicas=SIZE,
  )
  params = jax.tree.map(lambda x: x[0], _gradients())
  got, _ = _steps(tx, "vmap", params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    got,
    _expected("top_k", float(SIZE)),
  )


def test_the_mean_has_a_replicated_type():
  """What was gathered is typed as equal, so that it is replicated again."""
  tx = optax_dist.cross_shard("data", compression=METHODS["top_k"])
  spec = jax.sharding.PartitionSpec
  gradients = _gradients()["w"]
  with jax.set_mesh(maps.mesh(SIZE)):
    state = tx.init(jnp.zeros((6, 8)))
    specs = optax_dist.states.state_specs(state, "data")
    step = jax.jit(
      jax.shard_map(
        lambda g, s: tx.update(g[0], s),
        in_specs=(spec("data"), specs),
        out_specs=(spec(), specs),
      )
    )
    mean, _ = step(gradients, state)
  assert mean.shape == (6, 8)


@pytest.mark.parametrize("name", METHODS)
def test_local_updates_send_differences(name):
  """Against a loop in NumPy around the method."""
  rate, period = 0.1, 2
  method = METHODS[name]
  tx = optax_dist.local_updates(
    optax.sgd(rate),
    optax.sgd(1.0),
    "data",
    communication_period=period,
    num_replicas=SIZE,
    compression=method,
  )
  start = jax.tree.map(lambda x: x[0], _gradients(9))
  state = tx.init(start)
  axes = optax_dist.states.state_axes(state)
  update = jax.jit(
    jax.vmap(
      tx.update, axis_name="data", in_axes=(0, axes, 0), out_axes=(0, axes)
    )
  )
  params = jax.tree.map(lambda x: jnp.stack([x] * SIZE), start)
  leaves = [np.asarray(x) for x in jax.tree.leaves(start)]
  own = jax.vmap(lambda _: method.init(leaves))(jnp.arange(SIZE))
  reduce = jax.jit(
    jax.vmap(
      lambda x, s: method.reduce(x, s, ("data",)),
      axis_name="data",
    )
  )
  center = leaves
  for round_ in range(3):
    moved = [np.stack([c] * SIZE) for c in center]
    for tick in range(period):
      gradients = _gradients(10 * round_ + tick)
      updates, state = update(gradients, state, params)
      params = optax.apply_updates(params, updates)
      moved = [
        m - rate * g
        for m, g in zip(moved, jax.tree.leaves(gradients), strict=True)
      ]
    gaps = [c[None] - m for c, m in zip(center, moved, strict=True)]
    mean, own = reduce(gaps, own)
    center = [c - np.asarray(m[0]) for c, m in zip(center, mean, strict=True)]
    for a, b in zip(jax.tree.leaves(state.center), center, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  for x in jax.tree.leaves(params):
    np.testing.assert_allclose(x, np.stack([x[0]] * SIZE), atol=1e-6)


def test_a_replica_that_is_not_finite_moves_nothing():
  tx = optax_dist.local_updates(
    optax.sgd(1.0),
    optax.sgd(1.0),
    "data",
    communication_period=1,
    num_replicas=2,
    compression=compression.quantize(8, error_feedback=1.0),
  )
  state = tx.init(jnp.zeros(4))
  axes = optax_dist.states.state_axes(state)
  update = jax.vmap(
    tx.update, axis_name="data", in_axes=(0, axes, 0), out_axes=(0, axes)
  )
  gradients = jnp.stack([jnp.full(4, jnp.nan), jnp.full(4, -2.0)])
  _, state = jax.jit(update)(gradients, state, jnp.zeros((2, 4)))
  np.testing.assert_allclose(state.center, np.ones(4))
  residual = jax.tree.leaves(state.replica.value.residual)
  assert all(bool(jnp.all(jnp.isfinite(x))) for x in residual)


@maps.every_map
def test_adasum_is_the_formula_in_each_map(map_name):
  from optax_dist.transforms._adasum import adasum

  tx = optax_dist.cross_shard(maps.AXIS, reduction="adasum")
  fn = lambda g: tx.update(g, tx.init(g))[0]
  got = maps.run(map_name, fn, _gradients(), size=SIZE)
  for key, rows in _gradients().items():
    expected = adasum(jnp.asarray(rows))
    for i in range(SIZE):
      np.testing.assert_allclose(got[key][i], expected, rtol=1e-4, atol=1e-5)


def test_incompatible_arguments_are_refused():
  method = compression.sign()
  with pytest.raises(ValueError, match="can't be combined"):
    optax_dist.cross_shard(
      "data", compression=method, axis_index_groups=[[0, 1]]
    )
  with pytest.raises(ValueError, match="has no `reduction` 'adasum'"):
    optax_dist.cross_shard("data", compression=method, reduction="adasum")
  for aggregate in ({"compression": method}, {"reduction": "adasum"}):
    with pytest.raises(ValueError, match="`invariant_updates='reduced'`"):
      optax_dist.cross_shard("data", invariant_updates="reduced", **aggregate)


def test_a_summed_gradient_is_refused_with_the_remedy():
  tx = optax_dist.cross_shard("data", compression=compression.quantize(8))

  def step(x):
    gradient = jax.grad(lambda w: jnp.sum(w * x))(jnp.ones(3))
    return tx.update(gradient, tx.init(gradient))[0]

  mapped = jax.shard_map(
    step,
    mesh=maps.mesh(SIZE),
    in_specs=jax.sharding.PartitionSpec("data"),
    out_specs=jax.sharding.PartitionSpec(),
  )
  with pytest.raises(ValueError, match="local_params"):
    jax.jit(mapped)(jnp.ones(3 * SIZE))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_of_a_summed_gradient_is_refused_with_the_remedy(check_vma):
  """It was averaged with the other replicas' shards, of other parameters."""
  tx = optax_dist.cross_shard(
    maps.AXIS, compression=METHODS["top_k"], num_replicas=SIZE
  )
  with pytest.raises(ValueError, match=r"updates\['w'\] is one shard") as info:
    scattered.update(tx, SIZE, check_vma)
  assert "cross_shard(..., param_specs=...)" in str(info.value)
