"""Moving averages of parameters: TensorFlow's numbers, wherever they are kept.

`golden/tensorflow1/params_ema.json` has the averages of a variable and of a
statistic after each step (TensorFlow 2.21's `tf.compat.v1.train`).
"""

import functools
import json
import pathlib

import chex
import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from own_params import take_step

import optax_dist
from optax_dist import coordinator

N = 2
_FILE = "golden/tensorflow1/params_ema.json"
_RECORDED = json.loads(
  (pathlib.Path(__file__).parents[1] / _FILE).read_text("utf-8")
)
_GRADIENTS = np.asarray(_RECORDED["gradients"], np.float32)
_STATISTICS = np.asarray(_RECORDED["statistics"], np.float32)
_START = {"w": np.array([1, -1, 0.5], np.float32)}

_sgd = lambda: optax.sgd(0.5)
_ema = lambda **kwargs: optax_dist.params_ema(0.9999, **kwargs)


def _case(num_updates, when="after"):
  name = "num_updates" if num_updates else "constant"
  case = _RECORDED["cases"][f"{name}_{when}"]
  return {key: np.asarray(x, np.float32) for key, x in case.items()}


def _spread(t):
  """Gradients of two replicas, with the recorded one as their mean."""
  return {"w": np.stack([_GRADIENTS[t] - 0.25, _GRADIENTS[t] + 0.25])}


def _check_run(map_name, tx, num_updates):
  """Compares each step's averages with TensorFlow's."""

  def step(carry, gradient):
    params, state = carry
    return (), take_step(tx, state, params, gradient)

  carry = _START, tx.init(_START)
  run = maps.stepper(map_name, step, carry, N)
  averages = _case(num_updates)["average_of_w"]
  for t, expected in enumerate(averages):
    _, carry = run(carry, _spread(t))
    params, state = carry
    got = optax_dist.averaged_params(state, params)["w"]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("num_updates", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_position_in_a_chain_does_not_matter(place, num_updates):
  transforms = [optax_dist.cross_shard(maps.AXIS), _sgd()]
  transforms.insert(place, _ema(num_updates=num_updates))
  _check_run("vmap", optax.chain(*transforms), num_updates)


@maps.every_map
def test_the_averages_are_the_same_in_every_map(map_name):
  tx = optax.chain(
    _ema(num_updates=True), optax_dist.cross_shard(maps.AXIS), _sgd()
  )
  _check_run(map_name, tx, True)


_SYNC = {"replicas_to_aggregate": N, "total_num_replicas": N}
_AROUND = {
  "variable_averages": lambda: optax_dist.sync_replicas(
    _sgd(), maps.AXIS, variable_averages=0.9999, num_updates=True, **_SYNC
  ),
  "sync_replicas": lambda: optax_dist.sync_replicas(
    optax.chain(_sgd(), _ema(num_updates=True)), maps.AXIS, **_SYNC
  ),
  "sharded": lambda: optax_dist.sharded(
    optax.chain(_ema(num_updates=True), _sgd()), maps.AXIS, num_replicas=N
  ),
  "masked": lambda: optax.chain(
    optax_dist.cross_shard(maps.AXIS),
    optax.masked(optax.chain(_ema(num_updates=True), _sgd()), {"w": True}),
  ),
  "partition": lambda: optax.chain(
    optax_dist.cross_shard(maps.AXIS),
    optax.partition(
      {
        "a": optax.chain(_ema(num_updates=True), _sgd()),
        "b": optax.set_to_zero(),
      },
      {"w": "a"},
    ),
  ),
  "inject_hyperparams": lambda: optax.chain(
    optax_dist.cross_shard(maps.AXIS),
    optax.inject_hyperparams(
      lambda learning_rate: optax.chain(
        _ema(num_updates=True), optax.sgd(learning_rate)
      )
    )(learning_rate=0.5),
  ),
}


@pytest.mark.parametrize("name", _AROUND)
@maps.both_kinds
def test_averages_are_the_same_inside_other_transforms(map_name, name):
  _check_run(map_name, _AROUND[name](), True)


def test_slims_averages_move_before_the_step():
  """Read before the last move, or with the parameters before the step."""
  tx = optax.chain(_ema(num_updates=True), _sgd())
  params, state = _START, tx.init(_START)
  case = _case(True, "before")
  for t, expected in enumerate(case["average_of_w"]):
    before = params
    got = optax_dist.averaged_params(state, before)["w"]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)
    params, state = take_step(tx, state, params, {"w": _GRADIENTS[t]})
    np.testing.assert_allclose(params["w"], case["w"][t], rtol=1e-5, atol=1e-6)


def test_zero_debias_has_no_effect_on_variables():
  for when in ("before", "after"):
    with_it, without = (
      _RECORDED["cases"][f"{name}_{when}"]
      for name in ("zero_debias", "num_updates")
    )
    assert with_it == without


@pytest.mark.parametrize("num_updates", [False, True])
def test_statistics_are_averaged_by_the_same_rule(num_updates):
  ema = _ema(num_updates=num_updates)
  statistics = np.zeros(2, np.float32)
  state = ema.init(statistics)
  case = _case(num_updates)
  for new, expected in zip(_STATISTICS, case["average_of_mean"], strict=True):
    updates, state = ema.update(None, state, statistics)
    assert updates is None
    statistics = new
    got = optax_dist.averaged_params(state, statistics)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-9)


# --- Replicas that train their own parameters --------------------------------


def _expected(history, decay=0.5):
  average = history[0]
  for x in history[1:]:
    average = average - (1 - decay) * (average - x)
  return average


@pytest.mark.parametrize(
  "kind", ["local_updates", "streaming_updates", "elastic_average"]
)
@maps.both_kinds
def test_inner_averages_follow_the_parameters_of_each_replica(kind, map_name):
  """Exchanges with other replicas are no updates of the inner transform."""
  inner = optax.chain(optax_dist.params_ema(0.5), _sgd())
  tx = every_transform.make(kind, inner, N)
  state = tx.init(_START)
  params = {"w": np.stack([_START["w"]] * N)}
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  history = [params["w"]]
  for t in range(5):
    params, state = run(state, params, _spread(t))
    history.append(params["w"])
  assert np.abs(history[-1][0] - history[-1][1]).min() > 0.01
  got = optax_dist.averaged_params(state, params)["w"]
  np.testing.assert_allclose(got, _expected(history), rtol=1e-5)
  with pytest.raises(ValueError, match="of all replicas, which have a leading"):
    optax_dist.averaged_params(state, _START)


@maps.both_kinds
def test_outer_averages_follow_the_center(map_name):
  tx = optax_dist.local_updates(
    _sgd(),
    optax.chain(optax.sgd(0.7), optax_dist.params_ema(0.5)),
    maps.AXIS,
    num_replicas=N,
    communication_period=2,
  )
  state = tx.init(_START)
  params = {"w": np.stack([_START["w"]] * N)}
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  history = [_START["w"]]
  for t in range(6):
    params, state = run(state, params, _spread(t))
    if t % 2:
      history.append(np.asarray(optax_dist.center_params(state)["w"]))
    center = optax_dist.center_params(state)
    got = optax_dist.averaged_params(state, center)["w"]
    np.testing.assert_allclose(got, _expected(history), rtol=1e-5)


# --- Other wrappers ----------------------------------------------------------


def test_averages_move_once_for_each_step_of_several_gradients():
  inner = optax.chain(optax_dist.params_ema(0.5), optax.sgd(0.5))
  tx = optax.MultiSteps(inner, 3).gradient_transformation()
  params, state = _START, tx.init(_START)
  history = [params["w"]]
  for t in range(8):
    with jax.numpy_dtype_promotion("standard"):
      params, state = take_step(tx, state, params, {"w": _GRADIENTS[t]})
    if t % 3 == 2:
      history.append(np.asarray(params["w"]))
    got = optax_dist.averaged_params(state, params)["w"]
    np.testing.assert_allclose(got, _expected(history), rtol=1e-5)


def test_a_dropped_gradient_moves_no_average():
  tx = optax.apply_if_finite(optax.chain(_sgd(), optax_dist.params_ema(0.5)), 9)
  params, state = _START, tx.init(_START)
  history = [params["w"]]
  for t in range(4):
    bad = {"w": np.full(3, np.nan, np.float32)}
    params, state = take_step(tx, state, params, bad)
    params, state = take_step(tx, state, params, {"w": _GRADIENTS[t]})
    history.append(np.asarray(params["w"]))
    got = optax_dist.averaged_params(state, params)["w"]
    np.testing.assert_allclose(got, _expected(history), rtol=1e-5)


def test_coordinator_keeps_averages_of_shared_parameters():
  opt = optax.chain(_ema(num_updates=True), _sgd())

  def train(replica):
    seen = []
    for t in range(4):
      replica.step({"w": jnp.asarray(_spread(t)["w"][replica.replica])})
      state = jax.device_get(replica.opt_state)
      seen.append(optax_dist.averaged_params(state, replica.params)["w"])
    return seen

  for averages in coordinator.run_embedded(train, N, opt, _START):
    np.testing.assert_allclose(
      averages, _case(True)["average_of_w"][:4], rtol=2e-6, atol=1e-7
    )


# --- What is averaged --------------------------------------------------------


@pytest.mark.parametrize(
  "mask", [{"w": True, "b": False}, lambda p: {"w": True, "b": False}]
)
def test_mask_selects_the_averaged_parameters(mask):
  ema = optax_dist.params_ema(0.5, mask=mask)
  params = {"w": jnp.zeros(2), "b": {"c": jnp.zeros(1), "d": jnp.zeros(1)}}
  later = jax.tree.map(lambda x: x + 1, params)
  _, state = ema.update(params, ema.init(params), params)
  got = optax_dist.averaged_params(state, later)
  chex.assert_trees_all_equal(got, {**later, "w": jnp.full(2, 0.5)})


def test_averages_have_a_wide_or_the_given_dtype():
  params = {"h": jnp.ones(1, jnp.bfloat16), "f": jnp.ones(1)}
  dtypes = lambda ema: {
    key: str(x.dtype) for key, x in ema.init(params).averages.items()
  }
  assert dtypes(_ema()) == {"h": "float32", "f": "float32"}
  assert dtypes(_ema(dtype="bfloat16")) == {"h": "bfloat16", "f": "bfloat16"}


def test_averages_before_the_first_update_ignore_nan():
  """Nothing moves before the first update, whatever the parameters are."""
  state = _ema().init(_START)
  nan = {"w": np.full(3, np.nan, np.float32)}
  got = optax_dist.averaged_params(state, nan)
  chex.assert_trees_all_equal(got, _START)


def test_invalid_arguments_of_init_and_update_are_refused():
  with pytest.raises(ValueError, match="`mask` must be a pytree of booleans"):
    _ema(mask={"x": True}).init(_START)
  state = _ema().init(_START)
  with pytest.raises(ValueError, match="params_ema needs the parameters"):
    _ema().update(_START, state)
  with pytest.raises(ValueError, match=r"params\['w'\] has shape \(2, 3\), bu"):
    _ema().update(_START, state, {"w": np.zeros((2, 3))})
