"""The page's schedules, clips and penalties give TensorFlow's numbers.

`golden/tensorflow1/schedules.json` has those of TensorFlow 2.21's `tf.compat.v1`. The
code is that of the rows and blocks of the page.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import porting_page
import pytest

import optax_dist

_RECORDED = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "golden/tensorflow1/schedules.json"
  ).read_text("utf-8")
)
_NAMES = {
  "exponential_decay": "tf.train.exponential_decay",
  "natural_exp_decay": "tf.train.natural_exp_decay",
  "inverse_time_decay": "tf.train.inverse_time_decay",
  "polynomial_decay": "tf.train.polynomial_decay(rate",
  "cosine_decay": "tf.train.cosine_decay",
}
_ARGUMENTS = {
  "polynomial_decay": {"steps": 5, "end": 1e-4, "power": 2.0},
  "cosine_decay": {"steps": 5, "alpha": 0.2},
}
_DECAYS = {"rate": 0.1, "steps": 4, "decay_rate": 0.5}
_GRADIENTS = {
  key: np.asarray(x, np.float32) for key, x in _RECORDED["gradients"].items()
}


@pytest.fixture(scope="module")
def page():
  return porting_page.blocks()[-1][1]


def _schedule(page, name):
  if name == "polynomial_decay_cycle":
    return page["cycled_polynomial"](0.1, 5, power=2.0)
  if name == "piecewise_constant":
    return page["piecewise_constant"]([3, 7], [1.0, 0.5, 0.1])
  of = name.removesuffix("_staircase")
  code = porting_page.code(_NAMES[of])
  if name != of:
    code = code.replace("staircase=False", "staircase=True")
    code = code.replace("t / steps", "t // steps")
  return eval(code, page | _DECAYS | _ARGUMENTS.get(of, {}))


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", _RECORDED["schedules"])
def test_each_schedule_is_tensorflows(page, name):
  schedule = jax.jit(_schedule(page, name))
  rates = [schedule(jnp.int32(t)) for t in range(12)]
  np.testing.assert_allclose(rates, _RECORDED["schedules"][name], rtol=2e-6)


def test_optaxs_piecewise_constant_changes_one_step_earlier():
  schedule = optax.piecewise_constant_schedule(1.0, {3: 0.5, 7: 0.2})
  rates = np.array([schedule(t) for t in range(12)])
  expected = np.array(_RECORDED["schedules"]["piecewise_constant"])
  different = np.flatnonzero(~np.isclose(rates, expected))
  assert different.tolist() == [3, 7]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("kind", ["cross_shard", "sync_replicas"])
def test_a_rate_counts_the_steps_before(page, kind):
  """With sync_replicas, a second gradient of each replica completes a step."""
  rate = page["piecewise_constant"]([3, 7], [1.0, 0.5, 0.1])
  sgd = optax_dist.optimizers.gradient_descent(rate)
  if kind == "cross_shard":
    tx, each = optax.chain(optax_dist.cross_shard("data"), sgd), 1
  else:
    tx, each = (
      optax_dist.sync_replicas(
        sgd, "data", replicas_to_aggregate=4, total_num_replicas=2
      ),
      2,
    )
  w = jnp.zeros(1)
  state = tx.init(w)
  axes = optax_dist.states.state_axes(state)
  step = jax.jit(
    jax.vmap(
      lambda s, w: tx.update(jnp.ones(1), s, w),
      in_axes=(axes, None),
      out_axes=(0, axes),
      axis_name="data",
      axis_size=2,
    )
  )
  seen = []
  for _ in range(12 * each):
    updates, state = step(state, w)
    w = w + updates[0]
    seen.append(w)
  trained = np.ravel(seen)[each - 1 :: each]
  np.testing.assert_allclose(trained, _RECORDED["trained"], rtol=1e-6)


def test_rate_counts_the_exchanges_of_all_replicas():
  """As many as if each of the replicas had counted its own."""
  names = {"rate": lambda t: t, "num_replicas": 2, "communication_period": 3}
  code = porting_page.row("in elastic_average").split("`")[1]
  schedule = eval(code, names)
  tx = optax_dist.elastic_average(
    optax.scale_by_schedule(schedule),
    "data",
    num_replicas=2,
    communication_period=3,
    moving_rate=0.0,
    rho=0.0,
  )
  params = jnp.zeros(2)
  state = tx.init(params[0])
  axes = optax_dist.states.state_axes(state)
  update = jax.jit(
    jax.vmap(
      tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"
    )
  )
  for _ in range(8):
    exchanges = 2 * int(optax.tree.get(state, "global_step"))
    updates, state = update(jnp.ones(2), state, params)
    np.testing.assert_array_equal(updates, [exchanges] * 2)
  assert exchanges == 4


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
  ("name", "start", "c"),
  [
    ("clip_by_value", "tf.clip_by_value", 0.3),
    ("clip_by_norm", None, 1.5),
    ("clip_by_global_norm", "tf.clip_by_global_norm", 1.5),
  ],
)
def test_gradients_are_clipped_as_by_tensorflow(page, name, start, c):
  code = porting_page.code(start) if start else f"{name}(c)"
  tx = eval(code, page | {"c": c})
  got, _ = tx.update(_GRADIENTS, tx.init(_GRADIENTS), _GRADIENTS)
  for key, expected in _RECORDED["clipped"][name].items():
    np.testing.assert_allclose(got[key], np.float32(expected), rtol=2e-6)


def test_a_loss_is_regularized_as_by_tensorflow(page):
  in_loss, decay = porting_page.row("scale * tf.nn.l2_loss").split("`")[1:4:2]
  names = page | {"scale": _RECORDED["scale"]}
  zeros = jax.tree.map(np.zeros_like, _GRADIENTS)
  tx = eval(decay, names)
  decays, _ = tx.update(zeros, tx.init(_GRADIENTS), _GRADIENTS)
  for key, w in _GRADIENTS.items():
    expected = np.float32(_RECORDED["clipped"]["l2_loss"][key])
    gradient = jax.grad(lambda w: eval(in_loss, names | {"w": w}))(w)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_allclose(decays[key], expected, rtol=1e-6)
