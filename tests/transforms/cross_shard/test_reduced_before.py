"""Tests of cross_shard on updates that were reduced before, under every map."""

import functools

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
PARAMS = {"w": np.array([[1.0, -2.0]], np.float32), "b": np.ones(2, np.float32)}
X = np.random.default_rng(0).normal(size=(N, 3, 1)).astype(np.float32)


def _mean(**kwargs):
  return optax_dist.cross_shard(maps.AXIS, **kwargs)


def _sum():
  return optax_dist.cross_shard(maps.AXIS, reduction="sum")


_pmean = optax.stateless(lambda g, _: jax.lax.pmean(g, maps.AXIS))


def _loss(params, x):
  return jnp.mean(jnp.square(x @ params["w"] + params["b"][None]))


MEAN = jax.tree.map(
  lambda *xs: np.mean(xs, axis=0),
  *[jax.grad(_loss)(PARAMS, x) for x in X],
)

CHAINS = {
  "once": ((_mean(),), 1),
  "twice": ((_mean(), _mean()), 1),
  "pmean_first": ((_pmean, _mean()), 1),
  "pmean_behind": ((_mean(), _pmean), 1),
  "scaled_between": ((_mean(), optax.scale(0.5), _mean()), 0.5),
  "sum_then_mean": ((_sum(), _mean()), N),
  "mean_then_sum": ((_mean(), _sum()), N),
  "twice_the_sum": ((_sum(), _sum()), N * N),
  "thrice": ((_mean(), optax.scale(2.0), _mean(), _pmean, _mean()), 2),
}


def _gradient(how, params, x):
  at = optax_dist.local_params(params, maps.AXIS) if how == "own" else params
  gradient = jax.grad(_loss)
  if how == "jitted":
    gradient = jax.jit(gradient)
  if how == "scanned":
    # Summed row by row, in a loop.
    def row(total, x):
      return jax.tree.map(jnp.add, total, jax.grad(_loss)(at, x[None])), None

    zeros = jax.tree.map(jnp.zeros_like, at)
    total, _ = jax.lax.scan(row, zeros, x)
    return jax.tree.map(lambda g: g / np.float32(len(x)), total)
  return gradient(at, x)


@maps.every_map
@pytest.mark.parametrize("how", ["own", "summed", "jitted", "scanned"])
def test_numbers_are_the_same_in_every_map(map_name, how):
  def step(x, params):
    gradient = _gradient(how, params, x)
    return {
      name: optax.chain(*chain).update(
        gradient, optax.chain(*chain).init(params), params
      )[0]
      for name, (chain, _) in CHAINS.items()
    }

  got = maps.run(map_name, step, X, maps.Replicated(PARAMS), size=N)
  for name, (_, factor) in CHAINS.items():
    for key, mean in MEAN.items():
      expected = np.broadcast_to(factor * mean, (N, *mean.shape))
      np.testing.assert_allclose(
        got[name][key], expected, rtol=1e-5, err_msg=name
      )


@maps.both_kinds
@pytest.mark.parametrize("accumulates", [False, True])
@jax.numpy_dtype_promotion("standard")  # optax.MultiSteps is not strict.
def test_reduction_inside_of_sync_replicas_is_not_repeated(
  map_name, accumulates
):
  """MultiSteps looks at the mean in a branch, where its origin does not show."""
  inner = optax.chain(_mean(), optax.sgd(1.0))
  if accumulates:
    inner = optax.MultiSteps(inner, 1)
  tx = optax_dist.sync_replicas(
    inner, maps.AXIS, replicas_to_aggregate=N, total_num_replicas=N
  )

  def step(state, x):
    params = optax_dist.local_params(PARAMS, maps.AXIS)
    return tx.update(jax.grad(_loss)(params, x), state, PARAMS)

  state = tx.init(PARAMS)
  updates, _ = maps.stepper(map_name, step, state, N)(state, X)
  for key, mean in MEAN.items():
    np.testing.assert_allclose(updates[key][0], -mean, rtol=1e-5)


@maps.tracked_map
@pytest.mark.parametrize("steps", [1, 3])
def test_second_step_in_one_program_is_reduced(map_name, steps):
  """A gradient at parameters that were updated by a mean is summed again."""
  tx = optax.chain(_mean(), optax.add_decayed_weights(0.1), optax.sgd(0.1))

  def train(x, params):
    state = tx.init(params)
    for _ in range(steps):
      gradient = jax.grad(_loss)(params, x)
      updates, state = tx.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
    return params

  got, expected = (
    maps.run(name, train, X, maps.Replicated(PARAMS), size=N)
    for name in (map_name, "vmap")
  )
  for key, value in expected.items():
    np.testing.assert_allclose(got[key], value, rtol=1e-5)


@maps.tracked_map
def test_reduction_before_a_branch_is_seen_inside_it(map_name):
  tx = _mean()

  def step(x, params):
    mean, _ = tx.update(_gradient("own", params, x), optax.EmptyState())
    return jax.lax.cond(
      jnp.all(params["b"] > 0),
      lambda: tx.update(mean, optax.EmptyState())[0],
      lambda: mean,
    )

  got = maps.run(map_name, step, X, maps.Replicated(PARAMS), size=N)
  np.testing.assert_allclose(got["w"][0], MEAN["w"], rtol=1e-5)


@maps.tracked_map
@pytest.mark.parametrize(
  ("policy", "factor"), [("summed", 1 / N), ("reduced", 1)]
)
def test_policy_decides_about_updates_of_unknown_origin(
  map_name, policy, factor
):
  tx = _mean(invariant_updates=policy)
  step = lambda mean: tx.update(mean, optax.EmptyState())[0]
  got = maps.run(map_name, step, maps.Replicated(MEAN), size=N)
  np.testing.assert_allclose(got["w"][0], np.float32(factor) * MEAN["w"])


@maps.tracked_map
@pytest.mark.parametrize("chain", [(_mean(),), (_pmean,)])
def test_updates_that_do_not_vary_can_be_refused(map_name, chain):
  tx = optax.chain(*chain, _mean(invariant_updates="error"))

  def step(x, params):
    return tx.update(_gradient("own", params, x), tx.init(params), params)[0]

  with pytest.raises(ValueError, match="already reduced"):
    maps.run(map_name, step, X, maps.Replicated(PARAMS), size=N)


def test_only_the_second_of_two_axes_is_reduced():
  """Over the other axis each replica still has its own."""
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  grads = np.arange(4.0, dtype=np.float32).reshape(2, 2) ** 2
  for reduction, expected in (("mean", grads.mean()), ("sum", 2 * grads.sum())):
    first = optax_dist.cross_shard("a", reduction=reduction)
    tx = optax.chain(
      first, optax_dist.cross_shard(("a", "b"), reduction=reduction)
    )
    for check_vma in (False, True):
      run = jax.shard_map(
        lambda g, tx=tx: tx.update(g[0, 0], tx.init(g))[0],
        mesh=mesh,
        in_specs=P("a", "b"),
        out_specs=P(),
        check_vma=check_vma,
      )
      np.testing.assert_allclose(jax.jit(run)(grads), expected)


def test_groups_of_equal_values_keep_them():
  groups = optax_dist.cross_shard(maps.AXIS, axis_index_groups=[[0, 1], [2, 3]])
  tx = optax.chain(_mean(), groups)
  step = lambda x: tx.update(x, tx.init(x))[0]
  for map_name in ("shard_map", "shard_map_vma"):
    got = maps.run(map_name, step, X, size=N)
    np.testing.assert_allclose(got[0], X.mean(0), rtol=1e-5)


@maps.tracked_map
def test_reduced_sparse_updates_are_not_reduced_again(map_name):
  tx = optax.chain(_mean(), _mean())
  rows = np.arange(N, dtype=np.int32)[:, None]
  values = X[:, :1]

  def step(values, rows):
    slices = optax_dist.IndexedSlices(values, rows, (N, 1))
    return tx.update(slices, tx.init(None))[0].to_dense()

  got = maps.run(map_name, step, values, rows, size=N)
  np.testing.assert_allclose(got[0], values[:, 0] / N, rtol=1e-6)


@functools.cache
def _axis_of_one():
  return jax.make_mesh((1,), (maps.AXIS,), axis_types=(AxisType.Auto,))


def test_reduction_over_one_replica_changes_nothing():
  tx = optax.chain(_sum(), _mean())
  run = jax.shard_map(
    lambda x: tx.update(x[0], tx.init(x))[0],
    mesh=_axis_of_one(),
    in_specs=P(maps.AXIS),
    out_specs=P(),
  )
  np.testing.assert_allclose(jax.jit(run)(X[:1]), X[0])
