"""Checkpoints that TensorFlow wrote: read, and gone on with.

`checkpoints.json` has the variables of one after three steps, and the parameters
after three more, by optimizer (TensorFlow 2.21's `tf.compat.v1.train`).
`scoped_checkpoints.json` has the same of optimizers that were built in scopes, of
Keras's, and of others that name their slots in their own way.
"""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import optimizers, tensorflow1

_recorded = lambda name: json.loads(
  pathlib.Path(__file__).with_name(name).read_text("utf-8")
)
_RECORDED = _recorded("checkpoints.json")
_SCOPED = _recorded("scoped_checkpoints.json")
OPTIMIZERS = {
  "Adam": lambda: optimizers.adam(0.1),
  "Momentum": lambda: optimizers.momentum(0.1, 0.9),
  "Adagrad": lambda: optimizers.adagrad(0.1),
  "AdagradDA": lambda: optimizers.adagrad_da(0.1),
  "Adadelta": lambda: optimizers.adadelta(0.1),
  "RMSProp": lambda: optimizers.rmsprop(0.1, momentum=0.9),
  "RMSPropCentered": lambda: optimizers.rmsprop(
    0.1, momentum=0.9, centered=True
  ),
  "Ftrl": lambda: optimizers.ftrl(0.1),
  "ProximalAdagrad": lambda: optimizers.proximal_adagrad(0.1),
  "ProximalGradientDescent": lambda: optimizers.proximal_gradient_descent(0.1),
  "GradientDescent": lambda: optimizers.gradient_descent(0.1),
}


class Reader:
  def __init__(self, variables):
    self.variables = {
      name: np.asarray(value, np.int64 if name == "global_step" else np.float32)
      for name, value in variables.items()
    }

  def get_variable_to_shape_map(self):
    return {name: list(value.shape) for name, value in self.variables.items()}

  def get_tensor(self, name):
    return self.variables[name]


def params():
  return {"layer": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}}


def loss(params):
  layer = params["layer"]
  return jnp.sum(layer["kernel"] ** 2) + jnp.sum((layer["bias"] - 1.0) ** 2)


def test_each_recording_has_its_optimizer():
  assert set(_RECORDED) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chained", [False, True])
def test_training_continues_where_tensorflow_stopped(name, chained):
  tx = OPTIMIZERS[name]()
  if chained:
    tx = optax.chain(optax.clip_by_global_norm(1e6), tx)
  recorded = _RECORDED[name]
  result = tensorflow1.restore_checkpoint(
    Reader(recorded["variables"]), params(), tx.init(params())
  )
  assert result.global_step == 3
  now, state = result.params, result.opt_state
  np.testing.assert_array_equal(
    now["layer"]["kernel"],
    np.asarray(recorded["variables"]["layer/kernel"], np.float32),
  )
  like = jax.tree.map(lambda x: (x.shape, x.dtype), tx.init(params()))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
  for _ in range(3):
    updates, state = tx.update(jax.grad(loss)(now), state, now)
    now = optax.apply_updates(now, updates)
  for leaf in ("kernel", "bias"):
    np.testing.assert_allclose(
      now["layer"][leaf], recorded["after"][f"layer/{leaf}"], rtol=2e-6
    )


@pytest.mark.parametrize("name", ["Adam", "Momentum", "RMSProp"])
def test_training_continues_with_a_sharded_state(name):
  """Each of two replicas has a half of each slot."""
  recorded = _RECORDED[name]
  tx = optax_dist.sharded(OPTIMIZERS[name](), "data", num_replicas=2)
  now, state, step = tensorflow1.restore_checkpoint(
    Reader(recorded["variables"]), params(), tx.init(params())
  )
  assert step == 3
  axes = optax_dist.states.state_axes(state)
  update = jax.jit(
    jax.vmap(
      lambda s, p: tx.update(jax.grad(loss)(p), s, p),
      in_axes=(axes, None),
      out_axes=(0, axes),
      axis_name="data",
      axis_size=2,
    )
  )
  for _ in range(3):
    updates, state = update(state, now)
    now = jax.tree.map(lambda w, u: w + u[0], now, updates)
  for leaf in ("kernel", "bias"):
    np.testing.assert_allclose(
      now["layer"][leaf], recorded["after"][f"layer/{leaf}"], rtol=2e-6
    )


def test_restored_slots_change_the_training():
  """Without them the three steps end elsewhere, so the test above can fail."""
  tx, recorded = OPTIMIZERS["Adam"](), _RECORDED["Adam"]
  result = tensorflow1.restore_checkpoint(
    Reader(recorded["variables"]), params(), tx.init(params())
  )
  now, state = result.params, tx.init(params())
  for _ in range(3):
    updates, state = tx.update(jax.grad(loss)(now), state, now)
    now = optax.apply_updates(now, updates)
  after = np.asarray(recorded["after"]["layer/kernel"])
  assert np.abs(now["layer"]["kernel"] - after).max() > 1e-3


def test_variables_may_be_mapped_to_other_names():
  variables = {
    name.replace("layer/", "tower_0/dense/"): value
    for name, value in _RECORDED["Momentum"]["variables"].items()
  }
  tx = OPTIMIZERS["Momentum"]()
  result = tensorflow1.restore_checkpoint(
    Reader(variables),
    params(),
    tx.init(params()),
    variable=lambda path: path.replace("layer/", "tower_0/dense/"),
  )
  np.testing.assert_array_equal(
    optax_dist.states.get_slot(result.opt_state, "layer/bias", "momentum"),
    np.asarray(variables["tower_0/dense/bias/Momentum"], np.float32),
  )


def test_counters_and_powers_are_restored():
  tx = OPTIMIZERS["Adam"]()
  recorded = _RECORDED["Adam"]["variables"]
  state = tensorflow1.restore_checkpoint(
    Reader(recorded), params(), tx.init(params())
  ).opt_state
  assert optax.tree.get(state, "global_step") == 3
  assert optax.tree.get(state, "beta1_power") == np.float32(
    recorded["beta1_power"]
  )


def test_a_variable_that_is_missing_is_named():
  variables = dict(_RECORDED["Adam"]["variables"])
  del variables["layer/bias/Adam_1"]
  tx = OPTIMIZERS["Adam"]()
  with pytest.raises(
    KeyError,
    match=r"the slots \['m', 'v'\] of the variable 'layer/bias'; .*/Adam'\]",
  ):
    tensorflow1.restore_checkpoint(
      Reader(variables), params(), tx.init(params())
    )


def test_powers_of_several_optimizers_are_mapped_or_refused():
  """The plain ones are gone, and two scopes have them."""
  powers = {
    k: v for k, v in _RECORDED["Adam"]["variables"].items() if "_po" in k
  }
  scoped = {
    name: value
    for name, value in _RECORDED["Adam"]["variables"].items()
    if name not in powers
  }
  for i, scope in enumerate(("a", "b")):
    scoped |= {f"{scope}/{k}": np.float32(v + i) for k, v in powers.items()}
  state = OPTIMIZERS["Adam"]().init(params())
  with pytest.raises(
    KeyError, match=r"several scopes, \['a/beta1_power', 'b/b.*`variable=`"
  ):
    tensorflow1.restore_checkpoint(Reader(scoped), params(), state)
  result = tensorflow1.restore_checkpoint(
    Reader(scoped),
    params(),
    state,
    variable=lambda name: f"b/{name}" if name.endswith("_power") else name,
  )
  assert optax.tree.get(result.opt_state, "beta2_power") == np.float32(
    scoped["b/beta2_power"]
  )


@pytest.mark.parametrize(
  "variable",
  [
    "tower/{}".format,
    {
      path: f"tower/{path}" for path in ("layer/kernel", "layer/bias")
    }.__getitem__,
    lambda path: "tower/{}/{}".format(*path.split("/")),
  ],
)
def test_a_map_of_the_parameters_names_leaves_the_other_names(variable):
  """TensorFlow adds the scope of a layer to slots, not to powers and the step."""
  variables = {
    f"tower/{name}" if "/" in name else name: value
    for name, value in _RECORDED["Adam"]["variables"].items()
  }
  result = tensorflow1.restore_checkpoint(
    Reader(variables),
    params(),
    OPTIMIZERS["Adam"]().init(params()),
    variable=variable,
  )
  assert result.global_step == 3
  assert optax.tree.get(result.opt_state, "beta1_power") == np.float32(
    variables["beta1_power"]
  )


def test_a_checkpoint_without_a_global_step_is_refused_or_gets_one():
  variables = dict(_RECORDED["Adam"]["variables"])
  del variables["global_step"]
  tx = OPTIMIZERS["Adam"]()
  args = Reader(variables), params(), tx.init(params())
  with pytest.raises(
    KeyError, match=r"global_step.*which the checkpoint has not.*`global_step=`"
  ):
    tensorflow1.restore_checkpoint(*args)
  result = tensorflow1.restore_checkpoint(*args, global_step=7)
  assert result.global_step == 7
  assert optax.tree.get(result.opt_state, "global_step") == 7


def _sync_replicas(**arguments):
  return optax_dist.sync_replicas(
    OPTIMIZERS["Adam"](),
    "data",
    replicas_to_aggregate=2,
    total_num_replicas=2,
    **arguments,
  )


def test_first_gradients_after_restoring_are_fresh():
  tx = _sync_replicas()
  result = tensorflow1.restore_checkpoint(
    Reader(_RECORDED["Adam"]["variables"]), params(), tx.init(params())
  )
  assert result.opt_state.global_step == 3
  state_axes = optax_dist.states.state_axes(result.opt_state)
  update = jax.vmap(
    lambda state, gradient: tx.update(gradient, state, result.params),
    in_axes=(state_axes, None),
    out_axes=(0, state_axes),
    axis_size=2,
    axis_name="data",
  )
  _, state = update(result.opt_state, params())
  assert state.global_step == 4
  np.testing.assert_array_equal(state.replica.value.accepted, [1, 1])


def test_moving_averages_of_sync_replicas_are_restored():
  recorded = _RECORDED["Adam"]["variables"]
  variables = dict(recorded)
  for i, leaf in enumerate(("kernel", "bias")):
    name = f"layer/{leaf}/ExponentialMovingAverage"
    variables[name] = np.full(np.shape(recorded[f"layer/{leaf}"]), i + 0.5)
  tx = _sync_replicas(variable_averages=0.9)
  state = tx.init(params())
  result = tensorflow1.restore_checkpoint(Reader(variables), params(), state)
  averages = optax_dist.averaged_params(result.opt_state, result.params)
  np.testing.assert_array_equal(
    averages["layer"]["kernel"], np.full((3, 2), 0.5)
  )
  np.testing.assert_array_equal(averages["layer"]["bias"], np.full(2, 1.5))
  np.testing.assert_array_equal(
    optax_dist.states.get_slot(result.opt_state, "layer/bias", "v"),
    np.asarray(recorded["layer/bias/Adam_1"], np.float32),
  )
  with pytest.raises(KeyError, match="layer/bias/ExponentialMovingAverage"):
    tensorflow1.restore_checkpoint(Reader(recorded), params(), state)


def test_restored_averages_go_on_from_their_last_move():
  """With the decay of the step after the checkpoint's, as `num_updates` has it."""
  recorded = _RECORDED["GradientDescent"]["variables"]
  names = ("layer/kernel", "layer/bias")
  start = {name: 0.5 + np.asarray(recorded[name]) for name in names}
  averages = {f"{k}/ExponentialMovingAverage": x for k, x in start.items()}
  tx = optax.chain(
    optax_dist.params_ema(0.9999, num_updates=True),
    optimizers.gradient_descent(0.1),
  )
  restored = tensorflow1.restore_checkpoint(
    Reader(recorded | averages), params(), tx.init(params())
  )
  now, state = restored.params, restored.opt_state
  updates, state = tx.update(jax.grad(loss)(now), state, now)
  now = optax.apply_updates(now, updates)
  kernel = start["layer/kernel"]
  kernel = kernel - (1 - (1 + 4) / (10 + 4)) * (kernel - now["layer"]["kernel"])
  got = optax_dist.averaged_params(state, now)["layer"]["kernel"]
  np.testing.assert_allclose(got, kernel, rtol=1e-6)


def test_a_shape_that_differs_is_named():
  tx = OPTIMIZERS["GradientDescent"]()
  wide = {"layer": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(2)}}
  reader = Reader(_RECORDED["GradientDescent"]["variables"])
  with pytest.raises(ValueError, match=r"layer/kernel.*\(3, 4\).*\(3, 2\)"):
    tensorflow1.restore_checkpoint(reader, wide, tx.init(wide))


def test_two_optimizers_in_a_checkpoint_need_a_name():
  """Adagrad has one slot too, and Adam has two, so it is out of the question."""
  variables = _RECORDED["Adam"]["variables"] | {
    name: value
    for other in ("Momentum", "Adagrad")
    for name, value in _RECORDED[other]["variables"].items()
    if name.endswith(other)
  }
  tx = OPTIMIZERS["Momentum"]()
  state = tx.init(params())
  with pytest.raises(
    KeyError, match=r"name=.*\['\*/Adagrad', '\*/Momentum'\], in which \*"
  ):
    tensorflow1.restore_checkpoint(Reader(variables), params(), state)
  for name in ("Momentum", "*/Momentum"):
    result = tensorflow1.restore_checkpoint(
      Reader(variables), params(), state, name=name
    )
    np.testing.assert_array_equal(
      optax_dist.states.get_slot(result.opt_state, "layer/bias", "momentum"),
      np.float32(variables["layer/bias/Momentum"]),
    )


def test_slots_of_another_optimizer_are_not_taken():
  variables = _RECORDED["Adam"]["variables"]
  state = OPTIMIZERS["Momentum"]().init(params())
  with pytest.raises(KeyError, match=r"slots \['momentum'\].*'layer/.*Adam_1'"):
    tensorflow1.restore_checkpoint(Reader(variables), params(), state)
  with pytest.raises(KeyError, match=r"'layer/bias' called 'Ada'"):
    tensorflow1.restore_checkpoint(
      Reader(variables),
      params(),
      OPTIMIZERS["Adam"]().init(params()),
      name="Ada",
    )


def test_slots_that_tensorflow_never_had_are_refused():
  tx = optax.lion(0.1)
  with pytest.raises(
    ValueError, match=r"TensorFlow has no optimizer .*pass \(\) for"
  ):
    tensorflow1.restore_checkpoint(
      Reader(_RECORDED["Momentum"]["variables"]), params(), tx.init(params())
    )


def test_path_without_tensorflow_is_refused_with_the_remedy(
  monkeypatch, tmp_path
):
  monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
  with pytest.raises(ModuleNotFoundError, match="get_tensor"):
    tensorflow1.restore_checkpoint(tmp_path / "model.ckpt", params(), ())


# --- Optimizers in scopes, and others that name their slots in their own way ----


def _bert_rule(grad, param, slots, step):
  """Adam without bias correction, and with decoupled weight decay."""
  m = 0.9 * slots["m"] + 0.1 * grad
  v = 0.999 * slots["v"] + 0.001 * grad**2
  update = -step.learning_rate * (m / (jnp.sqrt(v) + 1e-6) + 0.01 * param)
  return update, {"m": m, "v": v}


def _two_optimizers():
  return optax.partition(
    {"a": optimizers.adam(0.1), "f": optimizers.ftrl(0.1)},
    {"layer": {"kernel": "a", "bias": "f"}},
  )


_OF_SCOPED = {
  "variable_scope": OPTIMIZERS["Adam"],
  "name_scope": OPTIMIZERS["Adam"],
  "both_scopes": OPTIMIZERS["Adam"],
  "accumulating": lambda: optax.MultiSteps(
    optimizers.adam(0.1), 2
  ).gradient_transformation(),
  "two_optimizers": _two_optimizers,
  "bert": lambda: optimizers.base_custom(
    _bert_rule, 0.1, slots={"m": 0.0, "v": 0.0}, needs_params=True
  ),
  "keras_adam": lambda: optimizers.keras("Adam", learning_rate=0.1),
  "keras_adam_in_scopes": lambda: optimizers.keras("Adam", learning_rate=0.1),
  "keras_nadam": lambda: optimizers.keras("Nadam", learning_rate=0.1),
  "keras_sgd": lambda: optimizers.keras("SGD", learning_rate=0.1, momentum=0.9),
  "keras_rmsprop": lambda: optimizers.keras(
    "RMSprop", learning_rate=0.1, momentum=0.9, centered=True
  ),
}


def test_each_scoped_recording_has_its_optimizer():
  assert set(_SCOPED) == set(_OF_SCOPED)


@pytest.mark.parametrize("name", _OF_SCOPED)
def test_training_continues_from_slots_in_scopes(name):
  tx = optax.chain(optax_dist.params_ema(0.9), _OF_SCOPED[name]())
  recorded = _SCOPED[name]
  result = tensorflow1.restore_checkpoint(
    Reader(recorded["variables"]), params(), tx.init(params())
  )
  assert result.global_step == 3
  now, state = result.params, result.opt_state
  # Of two gradients at the same place.
  each = 2 if name == "accumulating" else 1
  for _ in range(3 * each):
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update(jax.grad(loss)(now), state, now)
    now = optax.apply_updates(now, updates)
  for leaf in ("kernel", "bias"):
    np.testing.assert_allclose(
      now["layer"][leaf], recorded["after"][f"layer/{leaf}"], rtol=2e-6
    )
    if each == 1:
      averages = optax_dist.averaged_params(state, now)["layer"][leaf]
      (expected,) = (
        value
        for key, value in recorded["after"].items()
        if key.endswith(f"layer/{leaf}/ExponentialMovingAverage")
      )
      np.testing.assert_allclose(averages, expected, rtol=2e-6)


def test_the_scopes_of_several_models_need_a_name():
  """Two models in one graph train the same variables, one after the other."""
  variables = dict(_SCOPED["variable_scope"]["variables"])
  for key, value in list(variables.items()):
    if key.startswith("training/") and "Moving" not in key:
      variables[key.replace("training/", "tuning/")] = 2 * np.asarray(value)
  state = OPTIMIZERS["Adam"]().init(params())
  with pytest.raises(
    KeyError, match=r"name=.*\['training/\*/Adam', 'tuning/\*/Adam'\]"
  ):
    tensorflow1.restore_checkpoint(Reader(variables), params(), state)
  for name in ("tuning/*/Adam", "tuning"):
    result = tensorflow1.restore_checkpoint(
      Reader(variables), params(), state, name=name
    )
    for slot, key in (("m", "Adam"), ("v", "Adam_1")):
      np.testing.assert_array_equal(
        optax_dist.states.get_slot(result.opt_state, "layer/bias", slot),
        np.float32(variables[f"tuning/layer/bias/{key}"]),
      )
    assert optax.tree.get(result.opt_state, "beta1_power") == np.float32(
      variables["tuning/beta1_power"]
    )


def test_variables_with_equal_endings_have_their_own_slots():
  """`layer/bias` of the model, and `tower/layer/bias`, which is no slot's scope."""
  recorded = _RECORDED["Adam"]["variables"]
  more = {
    f"tower/{k}": 2 * np.asarray(v) for k, v in recorded.items() if "/" in k
  }
  result = tensorflow1.restore_checkpoint(
    Reader(recorded | more), params(), OPTIMIZERS["Adam"]().init(params())
  )
  np.testing.assert_array_equal(
    optax_dist.states.get_slot(result.opt_state, "layer/bias", "m"),
    np.float32(recorded["layer/bias/Adam"]),
  )


def test_a_checkpoint_without_slots_is_read_with_an_empty_state():
  """RETURNN's are such: parameters and the step."""
  variables = _RECORDED["GradientDescent"]["variables"]
  with pytest.raises(KeyError, match=r"RETURNN saves none\), pass \(\) for"):
    tensorflow1.restore_checkpoint(
      Reader(variables), params(), OPTIMIZERS["Adam"]().init(params())
    )
  result = tensorflow1.restore_checkpoint(Reader(variables), params(), ())
  assert result.opt_state == ()
  assert result.global_step == 3
  np.testing.assert_array_equal(
    result.params["layer"]["bias"], np.float32(variables["layer/bias"])
  )


@pytest.mark.parametrize(
  ("name", "values"),
  [
    ("checkpoint", [None, 3, object()]),
    ("variable", ["w", None]),
    ("global_step", ["3", -1, 2.0, True, 2**63]),
  ],
)
def test_wrong_arguments_are_refused_by_name(name, values):
  job = types.SimpleNamespace(
    get_variable_to_shape_map=lambda: {"w": [2]},
    get_tensor=lambda name: np.ones(2, np.float32),
  )
  given = {"checkpoint": job, "params": {"w": jnp.ones(2)}, "opt_state": ()}
  restored = tensorflow1.restore_checkpoint(**given, global_step=np.int64(5))
  assert type(restored.global_step) is int
  for value in values:
    with pytest.raises(ValueError, match=f"`{name}` must be"):
      tensorflow1.restore_checkpoint(**given | {name: value})
