"""Tests of parameters that each replica differentiates for itself."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

import optax_dist

N = 4


@maps.every_map
def test_gradient_at_local_params_is_local(map_name):
  x = np.arange(N, dtype=np.float32)

  def step(params, x):
    at = optax_dist.local_params(params, maps.AXIS)
    return jax.grad(lambda p: p["w"] * x)(at)["w"]

  params = maps.Replicated({"w": np.float32(1), "none": None})
  np.testing.assert_array_equal(maps.run(map_name, step, params, x, size=N), x)


@maps.untracked_map
def test_local_params_changes_nothing_in_an_untracked_map(map_name):
  def step(x):
    params = {"w": x, "b": [x]}
    assert optax_dist.local_params(params, maps.AXIS) is params
    return x

  maps.run(map_name, step, np.ones(N, np.float32), size=N)


@maps.tracked_map
def test_local_params_moves_no_data(map_name):
  step = lambda w, x: optax_dist.local_params(w, [maps.AXIS]) + x
  args = maps.Replicated(np.float32(1)), np.ones(N, np.float32)
  jaxpr = str(jax.make_jaxpr(maps.mapped(map_name, step, args, N))(*args))
  assert "psum" not in jaxpr
  assert "all_gather" not in jaxpr


def test_local_params_outside_of_a_map_is_refused():
  with pytest.raises(optax_dist.UnboundAxisError, match="local_params"):
    optax_dist.local_params(jnp.ones(2), "data")


def test_empty_axis_names_are_refused():
  with pytest.raises(ValueError, match="`axis_name` must hold"):
    optax_dist.local_params(jnp.ones(2), ())
