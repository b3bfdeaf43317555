"""Tests of what elastic_average refuses, and how it says so."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

from optax_dist import UnboundAxisError, local_params
from optax_dist.transforms.elastic_average import elastic_average

N = 4


def _one_replica(state):
  own = jax.tree.map(lambda x: x[0], state.replica.value)
  return state._replace(replica=type(state.replica)(own))


@pytest.mark.parametrize(
  ("name", "value", "what"),
  [
    ("num_replicas", 0, "positive integer, got 0"),
    ("num_replicas", 2.0, "positive integer, got 2.0"),
    ("communication_period", 0, "positive integer, got 0"),
    ("communication_period", True, "positive integer, got True"),
    ("moving_rate", -0.1, "not negative, got -0.1"),
    ("moving_rate", np.ones(2), "scalar"),
    ("rho", float("nan"), "finite"),
    ("rho", "x", "scalar"),
    ("learning_rate", 0.0, "positive, got 0.0"),
    ("exchange", "before", "'after_step', 'same_point', got 'before'"),
  ],
)
def test_bad_arguments(name, value, what):
  with pytest.raises(ValueError, match=f"`{name}` must be .*{what}"):
    elastic_average(optax.sgd(0.1), "i", **{name: value})


def test_an_unknown_learning_rate():
  with pytest.raises(ValueError, match="give `learning_rate`, or `rho`"):
    elastic_average(optax.adam(0.1), "i", num_replicas=2)
  elastic_average(optax.adam(0.1), "i", num_replicas=2, rho=0.0)


def test_an_unknown_number_of_replicas():
  tx = elastic_average(optax.sgd(0.1), "i", rho=0.0)
  with pytest.raises(
    ValueError, match="Give `num_replicas`, or call init inside"
  ):
    tx.init(jnp.zeros(2))


@maps.both_kinds
def test_the_number_of_workers_must_be_that_of_replicas(map_name):
  tx = elastic_average(optax.sgd(0.1), maps.AXIS, num_replicas=3, rho=0.0)
  with pytest.raises(ValueError, match=r"`num_replicas` is 3, .* 4 replicas"):
    maps.run(map_name, lambda x: tx.init(x).center, np.ones((N, 1)), size=N)


@maps.tracked_map
def test_parameters_must_be_the_replicas_own(map_name):
  tx = elastic_average(optax.sgd(0.1), maps.AXIS, rho=0.0)

  def step(cast, w, g):
    w = {"a": [local_params(w, maps.AXIS) if cast else w]}
    state = tx.init(w)
    return tx.update({"a": [g]}, state, w)[0]

  args = maps.Replicated(np.ones(2, np.float32)), np.ones((N, 2), np.float32)
  with pytest.raises(
    ValueError, match=r"params\['a'\]\[0\] does not vary"
  ) as e:
    maps.run(map_name, functools.partial(step, False), *args, size=N)
  assert "local_params" in str(e.value)
  maps.run(map_name, functools.partial(step, True), *args, size=N)


@maps.tracked_map
def test_counters_must_be_equal_on_all_replicas(map_name):
  tx = elastic_average(optax.sgd(0.1), maps.AXIS, num_replicas=N, rho=0.0)
  state = jax.tree.map(lambda x: np.stack([x] * N), tx.init(jnp.zeros(2)))
  with pytest.raises(ValueError, match=r"could disagree on when .*state_specs"):
    maps.run(
      map_name, lambda s, g: tx.update(g, s, g), state, np.ones((N, 2)), size=N
    )


def test_bad_calls_of_update():
  tx = elastic_average(optax.sgd(0.1), "i", num_replicas=2, rho=0.0)
  state = tx.init({"w": jnp.zeros(2)})
  w = {"w": jnp.zeros(2)}

  def update(*args):
    return jax.vmap(
      lambda _: tx.update(*args), axis_name="i", axis_size=2, in_axes=None
    )(0)

  with pytest.raises(
    UnboundAxisError, match=r"elastic_average: unbound .* 'i'"
  ):
    tx.update(w, state, w)
  with pytest.raises(ValueError, match="needs the parameters"):
    update(w, state)
  with pytest.raises(
    ValueError, match=r"params\['w'\] has shape \(1, 2\), but"
  ):
    update({"w": w["w"][None]}, state, {"w": w["w"][None]})
  with pytest.raises(ValueError, match="sees the state of 2 replicas"):
    update(w, state, w)
  own = _one_replica(state)
  with pytest.raises(ValueError, match="must have the structure of `params`"):
    update([w], own, w)
  with pytest.raises(TypeError, match=r"updates\['w'\] is int32"):
    update({"w": jnp.zeros(2, jnp.int32)}, own, w)
