"""Tests of numbers of 8 bits: sums are computed in float32, and rounded once."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist

N = 8
_DTYPES = ["float8_e4m3fn", "float8_e5m2"]
_each_dtype = pytest.mark.parametrize("dtype", _DTYPES)
_SOME_MAPS = ["vmap", "pmap", "shard_map", "shard_map_vma"]
_some_cases = pairwise.every_value(map_name=_SOME_MAPS, dtype=_DTYPES)


def _gradients(dtype):
  """Numbers whose sum is too large, or differs by less than the last bit."""
  rows = np.ones((N, 4), np.float32)
  rows[0, 0] = 16.0
  rows[:, 1] = jnp.finfo(dtype).max / 4
  rows[:, 2] = np.arange(N)
  return jnp.asarray(rows, dtype)


def _rounded(x, dtype):
  return np.asarray(jnp.asarray(x, dtype), np.float32)


def _check_mean(tx, map_name, dtype, ticks=1, sign=1):
  gradients, params = _gradients(dtype), jnp.zeros(4, dtype)
  state = tx.init(params)
  run = maps.stepper(
    map_name, lambda state, g: tx.update(g, state, params), state, N
  )
  for _ in range(ticks):
    updates, state = run(state, gradients)
  assert updates.dtype == dtype
  mean = sign * np.mean(np.asarray(gradients, np.float32), axis=0)
  for row in np.asarray(updates, np.float32):
    np.testing.assert_array_equal(row, _rounded(mean, dtype))


@_each_dtype
@maps.both_kinds
def test_cross_shard_rounds_float8_once(map_name, dtype):
  _check_mean(optax_dist.cross_shard(maps.AXIS), map_name, dtype)


@_some_cases
def test_float8_sum_is_rounded_once(map_name, dtype):
  tx = optax_dist.cross_shard(maps.AXIS, reduction="sum")
  gradients = _gradients(dtype)[:, 2:]
  result = maps.run(
    map_name, lambda g: tx.update(g, tx.init(g))[0], gradients, size=N
  )
  total = np.sum(np.asarray(gradients, np.float32), axis=0)
  for row in np.asarray(result, np.float32):
    np.testing.assert_array_equal(row, _rounded(total, dtype))


@_some_cases
def test_sharded_rounds_float8_once(map_name, dtype):
  tx = optax_dist.sharded(optax.sgd(1.0), maps.AXIS, num_replicas=N)
  _check_mean(tx, map_name, dtype, sign=-1)


@pairwise.every_pair(map_name=_SOME_MAPS, dtype=_DTYPES, needed=[N, 2 * N])
def test_sync_replicas_rounds_float8_once(map_name, dtype, needed):
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=N,
  )
  _check_mean(tx, map_name, dtype, ticks=needed // N, sign=-1)


@_each_dtype
def test_clipping_rounds_once(dtype):
  tx = optax_dist.clip_by_global_norm(
    1.0, maps.AXIS, param_specs=jax.P(maps.AXIS)
  )
  shards = jnp.asarray(np.arange(1, N + 1), dtype)
  clipped = maps.run(
    "shard_map", lambda x: tx.update(x, tx.init(x))[0], shards, size=N
  )
  shards = np.asarray(shards, np.float32)
  np.testing.assert_array_equal(
    np.asarray(clipped, np.float32),
    _rounded(shards / np.linalg.norm(shards), dtype),
  )


@pytest.mark.parametrize(
  ("dtype", "rho", "point"),
  [("float8_e4m3fn", 0.3, 6.0), ("float8_e5m2", 0.09, 14.0)],
)
@maps.both_kinds
def test_the_pull_is_rounded_with_the_gradient(map_name, dtype, rho, point):
  tx = optax_dist.elastic_average(
    optax.identity(), maps.AXIS, num_replicas=N, moving_rate=0.0, rho=rho
  )
  state = tx.init(jnp.zeros(2, dtype))
  params = jnp.full((N, 2), point, dtype)
  gradients = jnp.ones((N, 2), dtype)
  run = maps.stepper(
    map_name, lambda state, g, x: tx.update(g, state, x), state, N
  )
  updates, _ = run(state, gradients, params)
  np.testing.assert_array_equal(
    np.asarray(updates, np.float32),
    np.full((N, 2), _rounded(1 + rho * point, dtype)),
  )
