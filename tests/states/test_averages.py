"""Tests of reading moving averages."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist


def _tx(decay=0.9, which=None):
  return optax_dist.sync_replicas(
    optax.sgd(1.0),
    "data",
    replicas_to_aggregate=2,
    total_num_replicas=2,
    variable_averages=decay,
    variables_to_average=which,
  )


def test_parameters_without_averages_are_returned_as_they_are():
  params = {"w": np.float32(1), "b": np.float32(2)}
  tx = optax.chain(optax.clip(1.0), _tx(which={"w": True, "b": False}))
  state = tx.init(params)
  got = optax_dist.averaged_params(state, {"w": 10.0, "b": 20.0})
  assert got == {"w": 1.0, "b": 20.0}


def test_integers_and_keys_have_no_average():
  params = {"w": jnp.zeros(2), "n": jnp.array([3]), "k": jax.random.key(0)}
  later = {"w": jnp.ones(2), "n": jnp.array([4]), "k": jax.random.key(1)}
  got = optax_dist.averaged_params(_tx().init(params), later)
  chex.assert_trees_all_equal(got, {**later, "w": params["w"]})


def test_averages_of_all_groups_of_a_partition_are_read():
  params = {"w": jnp.zeros(2), "b": jnp.ones(3), "rest": {"c": jnp.ones(1)}}
  some = _tx(which={"w": True, "b": False, "rest": False})
  groups = {"some": some, "none": _tx(decay=None), "all": _tx()}
  tx = optax.partition(groups, {"w": "some", "b": "all", "rest": "none"})
  later = jax.tree.map(lambda x: x + 5, params)
  got = optax_dist.averaged_params(tx.init(params), later)
  chex.assert_trees_all_equal(got, {**params, "rest": later["rest"]})


def test_averages_may_cover_only_some_parameters():
  params = {"w": jnp.zeros(2), "rest": {"c": jnp.ones(1), "d": jnp.ones(1)}}
  state = _tx(which={"w": True, "rest": False}).init(params)
  later = jax.tree.map(lambda x: x + 5, params)
  got = optax_dist.averaged_params(state, later)
  chex.assert_trees_all_equal(got, {**later, "w": params["w"]})


def test_two_averages_of_one_parameter_are_refused():
  state = optax.chain(_tx(), _tx()).init({"w": 1.0})
  with pytest.raises(ValueError, match="there are 2 for one"):
    optax_dist.averaged_params(state, {"w": 1.0})


def test_averages_are_returned_in_the_dtype_of_the_parameters():
  params = {"w": jnp.ones(2, jnp.bfloat16)}
  state = _tx().init(params)
  assert optax.tree.get(state, "averages")["w"].dtype == jnp.float32
  assert optax_dist.averaged_params(state, params)["w"].dtype == jnp.bfloat16


def test_without_averages_the_remedy_is_named():
  state = _tx(decay=None).init({"w": 1.0})
  with pytest.raises(
    ValueError, match=r"put optax_dist\.params_ema\(decay\) into"
  ):
    optax_dist.averaged_params(state, {"w": 1.0})
