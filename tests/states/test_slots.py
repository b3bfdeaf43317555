"""Tests of reading slots."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import optimizers
from optax_dist.states import slots

_PARAMS = {
  "layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
  "scale": jnp.ones([]),
}

# Names as the originals have them.
_ORIGINAL = {
  "adadelta": (optimizers.adadelta(0.1), ["accum", "accum_update"]),
  "adagrad": (optimizers.adagrad(0.1), ["accumulator"]),
  "adagrad_da": (
    optimizers.adagrad_da(0.1),
    ["gradient_accumulator", "gradient_squared_accumulator"],
  ),
  "adam": (optimizers.adam(0.1), ["m", "v"]),
  "amsgrad": (optimizers.amsgrad(0.1), ["m", "v", "v_hat"]),
  "ftrl": (optimizers.ftrl(0.1), ["accum", "linear"]),
  "gradient_descent": (optimizers.gradient_descent(0.1), []),
  "keras": (
    optimizers.keras("RMSprop", momentum=0.5, centered=True),
    ["mg", "momentum", "rms"],
  ),
  "keras_amsgrad": (
    optimizers.keras("Adam", amsgrad=True),
    ["m", "v", "vhat"],
  ),
  "momentum": (optimizers.momentum(0.1, 0.9), ["momentum"]),
  "rmsprop": (
    optimizers.rmsprop(lambda count: 0.1, centered=True),
    ["mg", "momentum", "rms"],
  ),
}


@pytest.mark.parametrize("name", _ORIGINAL)
def test_slot_names_are_those_of_the_original(name):
  optimizer, names = _ORIGINAL[name]
  state = optimizer.init(_PARAMS)
  assert slots.slot_names(state) == names
  for slot in names:
    got = slots.get_slot(state, "layer/kernel", slot)
    assert got.shape == (2, 3)


def _wrappers():
  adam = optimizers.adam(0.1)
  mask = {"layer": True, "scale": False}
  labels = {"layer": "a", "scale": "b"}
  return {
    "plain": adam,
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.chain(adam)),
    "named_chain": optax.named_chain(("first", optax.scale(2.0)), ("x", adam)),
    "masked": optax.masked(adam, mask),
    "multi_steps": optax.MultiSteps(adam, 2).gradient_transformation(),
    "if_finite": optax.apply_if_finite(adam, 3),
    "inject": optax.inject_hyperparams(optimizers.adam)(0.1),
    "partition": optax.partition({"a": adam, "b": optax.sgd(0.1)}, labels),
    "ema": optax.chain(adam, optax.ema(0.9)),
  }


@pytest.mark.parametrize("name", _wrappers())
def test_slots_are_found_inside_wrappers(name):
  optimizer = _wrappers()[name]
  state = optimizer.init(_PARAMS)
  grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), _PARAMS)
  # Some of optax's wrappers mix dtypes in their own counters.
  with jax.numpy_dtype_promotion("standard"):
    for _ in range(2):
      _, state = optimizer.update(grads, state, _PARAMS)
  assert {"m", "v"} <= set(slots.slot_names(state))
  m = slots.get_slot(state, ("layer", "bias"), "m")
  assert m.shape == (3,)
  assert (m > 0).all()
  assert np.isfinite(m).all()


def test_parameter_can_be_named_by_a_path_or_a_key_path():
  state = optimizers.adam(0.1).init(_PARAMS)
  state = state._replace(
    slots=jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.full_like(x, len(jax.tree_util.keystr(path))),
      state.slots,
    )
  )
  want = slots.get_slot(state, "layer/kernel", "m")
  paths = jax.tree_util.tree_leaves_with_path(_PARAMS)
  (key_path,) = [path for path, leaf in paths if leaf.ndim == 2]
  for way in (("layer", "kernel"), key_path):
    np.testing.assert_array_equal(slots.get_slot(state, way, "m"), want)


def test_a_single_array_has_the_empty_path():
  state = optimizers.momentum(0.1, 0.9).init(jnp.ones(4))
  assert slots.get_slot(state, "", "momentum").shape == (4,)
  assert slots.get_slot(state, (), "trace").shape == (4,)


def test_state_of_an_unknown_optimizer_is_named_by_its_field():
  state = optax.lion(0.1).init(_PARAMS)
  assert slots.slot_names(state) == ["mu"]
  assert slots.get_slot(state, "scale", "mu").shape == ()


def test_errors_list_the_known_slots():
  state = optimizers.adam(0.1).init(_PARAMS)
  with pytest.raises(KeyError, match=r"'x': the state has \['m', 'v'\]"):
    slots.get_slot(state, "scale", "x")
  with pytest.raises(KeyError, match="layer/bias"):
    slots.get_slot(state, "layer", "m")
  twice = (state, state)
  with pytest.raises(ValueError, match="'scale' has 2 slots 'm'"):
    slots.get_slot(twice, "scale", "m")


def test_slots_of_each_replica_are_found():
  params = {"w": jnp.zeros(3)}
  elastic = optax_dist.elastic_average(
    optax.sgd(0.1, momentum=0.9), "data", num_replicas=2, rho=0.0
  ).init(params)
  assert slots.slot_names(elastic) == ["center", "local_center", "momentum"]
  assert slots.get_slot(elastic, "w", "momentum").shape == (2, 3)
  assert slots.get_slot(elastic, "w", "center").shape == (3,)
  local = optax_dist.local_updates(
    optax.adam(0.1),
    optax.sgd(1.0, momentum=0.9),
    "data",
    num_replicas=2,
    communication_period=2,
  ).init(params)
  assert slots.slot_names(local) == ["center", "m", "momentum", "v"]
  sync = optax_dist.sync_replicas(
    optax.adam(0.1), "data", replicas_to_aggregate=3, total_num_replicas=2
  ).init(params)
  assert slots.slot_names(sync) == ["m", "v"]


def test_sharded_slots_are_named_by_their_parameter():
  tx = optax_dist.sharded(optimizers.adam(0.1), "data", num_replicas=2)
  state = tx.init({"layer": {"w": jnp.zeros((4, 3))}, "scale": jnp.ones(())})
  assert slots.slot_names(state) == ["m", "v"]
  assert slots.get_slot(state, "layer/w", "m").shape == (2, 2, 3)
  assert slots.get_slot(state, "scale", "v").shape == (2, 1)
