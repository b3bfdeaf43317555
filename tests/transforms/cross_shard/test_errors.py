"""Tests of what cross_shard refuses, when, and in which words."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

import optax_dist

N = 4
GROUPS = [[0, 3], [1, 2]]


def _update(tx, updates, params=None):
  return tx.update(updates, tx.init(updates), params)[0]


def _raised_while_tracing(map_name, step, *args, error=ValueError):
  with pytest.raises(error) as info:
    maps.run(map_name, step, *args, size=N)
  return str(info.value)


@maps.tracked_map
def test_invariant_updates_can_be_refused(map_name):
  tx = optax_dist.cross_shard(maps.AXIS, invariant_updates="error")
  message = _raised_while_tracing(
    map_name,
    functools.partial(_update, tx),
    maps.Replicated({"w": np.ones(2, np.float32)}),
  )
  assert "updates['w']" in message
  assert "local_params" in message


@maps.tracked_map
def test_a_summed_gradient_can_not_be_grouped(map_name):
  tx = optax_dist.cross_shard(maps.AXIS, axis_index_groups=GROUPS)
  message = _raised_while_tracing(
    map_name,
    functools.partial(_update, tx),
    maps.Replicated({"w": np.ones(2, np.float32)}),
  )
  assert "already summed" in message
  assert "axis_index_groups" in message


@maps.tracked_map
def test_ambiguous_invariant_update_is_refused(map_name):
  tx = optax_dist.cross_shard(maps.AXIS)
  step = lambda w, g: _update(tx, {"w": g}, {"w": w})
  w = np.ones((N, 2), np.float32)
  message = _raised_while_tracing(map_name, step, w, maps.Replicated(w[0]))
  assert "its parameter does" in message
  assert "invariant_updates" in message


def test_groups_need_a_single_axis():
  with pytest.raises(ValueError, match="single axis"):
    optax_dist.cross_shard(("a", "b"), axis_index_groups=[[0, 1]])


@maps.both_kinds
def test_groups_must_fit_the_axis(map_name):
  tx = optax_dist.cross_shard(
    maps.AXIS, axis_index_groups=[[0, 1], [2, 3], [4, 5]]
  )
  message = _raised_while_tracing(
    map_name, functools.partial(_update, tx), np.ones((N, 1), np.float32)
  )
  assert f"range({N})" in message


@maps.both_kinds
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, jax.dtypes.float0])
def test_integers_are_refused_by_name(map_name, dtype):
  tx = optax_dist.cross_shard(maps.AXIS)
  step = lambda x: _update(tx, {"layer": [x, np.zeros(2, dtype)]})
  message = _raised_while_tracing(
    map_name, step, np.ones((N, 1), np.float32), error=TypeError
  )
  assert "updates['layer'][1]" in message
  assert (
    "float0" if dtype == jax.dtypes.float0 else str(np.dtype(dtype))
  ) in message


@maps.both_kinds
def test_error_of_an_unbound_axis_lists_bound_axes(map_name):
  tx = optax_dist.cross_shard(["batch", maps.AXIS])
  message = _raised_while_tracing(
    map_name,
    functools.partial(_update, tx),
    np.ones((N, 1), np.float32),
    error=optax_dist.UnboundAxisError,
  )
  assert "'batch'" in message
  assert f"'{maps.AXIS}' (size {N})" in message


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_outside_of_any_map_cross_shard_raises(transform):
  tx = optax_dist.cross_shard("data")
  with pytest.raises(
    optax_dist.UnboundAxisError, match="no axis is bound here"
  ):
    transform(functools.partial(_update, tx))(jnp.ones(3))
