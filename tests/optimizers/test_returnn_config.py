"""Tests of RETURNN's configurations."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import optimizers

_ADAM = {"optimizer": {"class": "adam"}}
_TORCH_ADAM = _ADAM | {"backend": "torch"}
_GRAD = jnp.array([1e-12, 2.0, -3.0])


def _updates(optimizer):
  params = jnp.array([1.0, 2.0, -1.0])
  return optimizer.update(_GRAD, optimizer.init(params), params)[0]


@pytest.mark.parametrize(
  ("config", "want"),
  [
    ("adam", optimizers.adam(0.1, epsilon=1e-16)),
    ({"class": "AdamOptimizer"}, optimizers.adam(0.1, epsilon=1e-16)),
    (
      {"class": "ADAM", "epsilon": 1e-3, "beta1": 0.5},
      optimizers.adam(0.1, beta1=0.5, epsilon=1e-3),
    ),
    ({"class": "nadam"}, optimizers.nadam(0.1, epsilon=1e-16)),
    (
      {"class": "NadamKeras"},
      optimizers.keras(
        "Nadam", learning_rate=0.1, epsilon=1e-16, frozen_iterations=True
      ),
    ),
    (
      {"class": "CustomAdam", "learning_rate_multiplier": 0.5},
      optimizers.custom_adam(0.05, epsilon=1e-16),
    ),
    ({"class": "NeuralOptimizer1"}, optimizers.neural_optimizer1(0.1)),
    (
      {"class": "GradVarianceScaled"},
      optimizers.grad_variance_scaled(0.1, epsilon=1e-16),
    ),
    ({"class": "normalizedsgd"}, optimizers.normalized_sgd(0.1)),
    ({"class": "adagrad", "use_locking": True}, optimizers.adagrad(0.1)),
    ({"class": "ftrl", "accum_name": "x"}, optimizers.ftrl(0.1)),
    (
      {"class": "RMSPropOptimizer", "name": "x"},
      optimizers.rmsprop(0.1, epsilon=1e-16),
    ),
    (
      {"class": "sgd", "momentum": 0.9, "nesterov": True},
      optimizers.keras("SGD", learning_rate=0.1, momentum=0.9, nesterov=True),
    ),
  ],
)
def test_configuration_builds_the_optimizer(config, want):
  got = optimizers.from_returnn_config(config, 0.1)
  np.testing.assert_array_equal(_updates(got), _updates(want))


def test_keras_classes_do_not_clip_as_in_returnn():
  got = optimizers.from_returnn_config({"class": "sgd", "clipnorm": 0.5}, 0.1)
  want = optimizers.keras("SGD", learning_rate=0.1)
  np.testing.assert_array_equal(_updates(got), _updates(want))


def test_global_options_are_applied():
  config = {"optimizer": "momentum", "momentum": 0.7, "learning_rate": 0.1}
  got = optimizers.from_returnn_config(config)
  want = optimizers.momentum(0.1, 0.7)
  assert _updates(got).tolist() == _updates(want).tolist()
  config = {"optimizer": {"class": "adam"}, "optimizer_epsilon": 1.0}
  got = optimizers.from_returnn_config(config, 0.1)
  want = optimizers.adam(0.1, epsilon=1.0)
  assert _updates(got).tolist() == _updates(want).tolist()


def test_old_nadam_is_that_of_keras():
  got = optimizers.from_returnn_config({"nadam": True}, 0.1)
  want = optimizers.from_returnn_config("NadamKeras", 0.1)
  assert _updates(got).tolist() == _updates(want).tolist()


def test_decay_of_zero_is_applied():
  """RETURNN asks whether `rmsprop` is a float."""
  got = optimizers.from_returnn_config({"rmsprop": 0.0}, 0.1)
  want = optimizers.rmsprop(0.1, decay=0.0, epsilon=1e-16)
  assert _updates(got).tolist() == _updates(want).tolist()


def test_multiplier_scales_a_schedule():
  got = optimizers.from_returnn_config(
    {"class": "GradientDescent", "learning_rate_multiplier": 0.5},
    lambda count: jnp.float32(0.25),
  )
  assert _updates(got).tolist() == (-0.125 * _GRAD).tolist()


def test_keras_never_advances_iterations():
  tx = optimizers.from_returnn_config({"class": "sgd", "decay": 1.0}, 1.0)
  state = tx.init(_GRAD)
  for _ in range(2):
    updates, state = tx.update(_GRAD, state)
    assert updates.tolist() == (-_GRAD).tolist()


@pytest.mark.parametrize("name", optimizers.returnn_class_names())
def test_every_class_is_found_by_all_its_names(name):
  needed = {"momentum": 0.9} if name == "MomentumOptimizer" else {}
  short = name.removesuffix("Optimizer")
  for form in (name, name.lower(), short, short.upper()):
    optimizers.from_returnn_config({"class": form, **needed}, 0.1)


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"class": "adamm"}, "'AdamOptimizer'.*got 'adamm'"),
    ({"class": "adam", "rho": 1}, "among beta1, beta2, epsilon.*got rho"),
    (
      {"class": "adam", "learning_rate": 1},
      "learning_rate must be an argument",
    ),
    ({"beta1": 0.9}, "must have an 'optimizer' with a 'class', one of"),
    ({"class": "adamw"}, 'PyTorch backend need backend="torch"'),
    ({"class": "momentum"}, "momentum needs the arguments momentum"),
    ({"class": "BaseCustom"}, "abstract"),
    ({"class": None}, "got None"),
    ({"class": "adagrad", "epsilon": 1.0}, "got epsilon"),
    (None, "config must be the options .* got None"),
    ({"learning_rate": 0.1}, "Without one, RETURNN takes"),
    (_ADAM | {"gradient_clip": -1}, "gradient_clip must be positive, or 0"),
    (_ADAM | {"gradient_clip": "x"}, "gradient_clip must be a number"),
    (_ADAM | {"gradient_clip_norm": "inf"}, "must be finite, or 0 for off"),
    (_ADAM | {"accum_grad_multiple_step": 1.5}, "must be a whole number"),
    (_ADAM | {"accum_grad_multiple_step": max}, "got a function.*MultiSteps"),
    (_ADAM | {"use_horovod": True}, "put optax_dist.cross_shard"),
    (_ADAM | {"torch_distributed": {}, "maximize_grad_norm": 0.1}, "the loss"),
    (_ADAM | {"torch_distributed": {"x": 1}}, "put optax_dist.cross_shard"),
    (_ADAM | {"global_norm_tag": "x"}, "optax.partition"),
    (_ADAM | {"reset_updater_vars_mod_step": 9}, "anew with tx.init"),
    (_ADAM | {"extra_updates": {"x": max}}, "after optax.apply_updates"),
    (_ADAM | {"network": {"a": {"updater_opts": {"x": 1}}}}, "layer 'a' has"),
    (_ADAM | {"decouple_constraints": True}, "l2 must be given"),
    (_ADAM | {"backend": "theano"}, "backend must be one of tensorflow"),
    (_ADAM | {"backend": "jax"}, "calls optax itself: write optax.adamw"),
    (_ADAM | {"dynamic_learning_rate": 3}, "a function or a mapping, got 3"),
    (_ADAM | {"dynamic_learning_rate": lambda learning_rate: 1}, "kwargs"),
    (_ADAM | {"dynamic_learning_rate": lambda epoch, **_: 1}, "need epoch"),
    (_ADAM | {"dynamic_learning_rate": {"interval": 3}}, "interval and decay"),
    ({"adam": True, "momentum": 0.9}, "momentum must be 0 with adam"),
  ],
)
def test_invalid_configurations_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    optimizers.from_returnn_config(config, 0.1)


@pytest.mark.parametrize(
  ("optimizer", "settings", "message"),
  [
    ("adamw", {"weight_decay": 0.1}, "weight_decay_mask must say which"),
    ("adam", {"amsgrad": True}, "optax.amsgrad takes the maximum"),
    ("sgd", {"dampening": 0.1}, "dampening must be 0"),
    ("sgd", {"eps": 0.1}, "must be among momentum.*got eps"),
    ("sgd", {"decoupled_weight_decay": True}, "got decoupled_weight_decay"),
    ("nadam", {"eps": 0}, "eps must be positive"),
    ("adafactor", {}, "nearest is optax.adafactor"),
    ("LBFGS", {}, "nearest is optax.lbfgs"),
    ("muon", {}, "nearest is optax.contrib.muon"),
    ("rprop", {}, "nearest is optax.rprop"),
    ("returnn.torch.optim.lion.Lion", {}, "nearest is optax.lion"),
    ("momentum", {}, "one of PyTorch's .*'adamw'.*got 'momentum'"),
    ("adam", {"lr": 1.0}, "learning_rate must be an argument"),
    ("adam", {"param_groups_custom": max}, "optax.partition"),
  ],
)
def test_invalid_torch_configurations_are_refused(optimizer, settings, message):
  with pytest.raises(ValueError, match=message):
    optimizers.from_returnn_config(
      {"class": optimizer, **settings}, 0.1, backend="torch"
    )


@pytest.mark.parametrize(
  ("option", "value", "message"),
  [
    ("gradient_clip_norm", 1.0, "must be off with the torch backend"),
    ("gradient_nan_inf_filter", True, "must be off with the torch backend"),
    ("num_allowed_consec_invalid_gradient_steps", 0, "apply_if_finite"),
    ("dynamic_learning_rate", {"interval": 3, "decay": 0.5}, "a function"),
    ("dynamic_learning_rate", lambda network, **_: 1, "need a network"),
  ],
)
def test_torch_options_are_applied(option, value, message):
  config = _TORCH_ADAM | {option: value}
  with pytest.raises(ValueError, match=message):
    optimizers.from_returnn_config(config, 0.1)
  if option != "num_allowed_consec_invalid_gradient_steps":
    optimizers.from_returnn_config(config | {option: 0}, 0.1)


def test_arguments_of_the_other_backend_are_refused():
  with pytest.raises(ValueError, match="weight_decay_mask is of the torch"):
    optimizers.from_returnn_config(_ADAM, 0.1, weight_decay_mask=True)
  with pytest.raises(ValueError, match="l2 must be None with the torch"):
    optimizers.from_returnn_config(_TORCH_ADAM, 0.1, l2=0.1)
  with pytest.raises(ValueError, match="l2 must be None without decouple"):
    optimizers.from_returnn_config(_ADAM, 0.1, l2=0.1)


@pytest.mark.parametrize(
  "change",
  [
    {"learning_rates": [1.0]},
    {"learning_rates": np.ones(2)},
    {"learning_rate_control": "newbob"},
    {},
  ],
)
def test_a_learning_rate_that_changes_must_be_given(change):
  config = _ADAM | change | ({"learning_rate": 0.1} if change else {})
  with pytest.raises(ValueError, match="learning_rate must be given"):
    optimizers.from_returnn_config(config)
  optimizers.from_returnn_config(config, 0.1)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_gradient_noise_is_cut_off_at_two_deviations(backend):
  tx = optimizers.from_returnn_config(
    {"optimizer": {"class": "sgd"}, "gradient_noise": 0.3, "backend": backend},
    1.0,
  )
  zeros = {"a": jnp.zeros(40_000), "b": jnp.zeros(40_000)}
  first, state = tx.update(zeros, tx.init(zeros))
  second, _ = tx.update(zeros, state)
  for noise in (first["a"], first["b"], second["a"]):
    # The deviation of the normal distribution within two of its own is 0.8796.
    np.testing.assert_allclose(np.std(noise), 0.3 * 0.8796, rtol=0.02)
    assert 0.58 < np.abs(noise).max() <= 0.6
    assert abs(np.mean(noise)) < 0.005
  assert not np.any(first["a"] == first["b"])
  assert not np.any(first["a"] == second["a"])


def _rates_of(tx, steps):
  """The learning rate of each step of gradient descent."""
  ones = jnp.ones([])
  state, rates = tx.init(ones), []
  for _ in range(steps):
    updates, state = jax.jit(tx.update)(ones, state)
    rates.append(-float(updates))
  return rates


def _config(dynamic, **settings):
  return {
    "optimizer": {"class": "GradientDescent"},
    "learning_rate": 0.5,
    "dynamic_learning_rate": dynamic,
    **settings,
  }


def test_dynamic_learning_rate_follows_its_formula():
  def dynamic(*, network, global_train_step, learning_rate, **_):
    assert network.global_train_step is global_train_step
    return learning_rate / (1.0 + jnp.float32(global_train_step))

  tx = optimizers.from_returnn_config(_config(dynamic))
  np.testing.assert_allclose(_rates_of(tx, 3), [0.5, 0.25, 0.5 / 3])
  # The step counts gradients, and so does that of a schedule.
  accumulated = _config(dynamic, accum_grad_multiple_step=2)
  rates = _rates_of(optimizers.from_returnn_config(accumulated), 4)
  np.testing.assert_allclose(rates, [0, 2 * 0.5 / 2, 0, 2 * 0.5 / 4])
  tx = optimizers.from_returnn_config(
    accumulated, lambda step: jnp.float32(step)
  )
  np.testing.assert_allclose(_rates_of(tx, 4), [0, 2 * 1 / 2, 0, 2 * 3 / 4])


def test_schedule_with_dynamic_learning_rate_is_refused():
  def dynamic(*, network, global_train_step, learning_rate, **_):
    return learning_rate

  with pytest.raises(TypeError, match="a function of the step alone"):
    optimizers.from_returnn_config("adam", dynamic)
  with pytest.raises(TypeError, match="a function of the step alone"):
    optimizers.keras("Nadam", learning_rate=dynamic)


def test_dynamic_learning_rate_must_be_traceable():
  def dynamic(*, global_train_step, learning_rate, **_):
    return learning_rate if global_train_step < 3 else 0.0

  tx = optimizers.from_returnn_config(_config(dynamic))
  with pytest.raises(ValueError, match=r"jnp\.where"):
    _rates_of(tx, 1)

  def of_network(*, network, learning_rate, **_):
    return learning_rate * network.epoch

  tx = optimizers.from_returnn_config(_config(of_network))
  with pytest.raises(ValueError, match="must not read epoch of the network"):
    _rates_of(tx, 1)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("name", ["adagrad", "adam", "nadam", "sgd"])
def test_the_global_step_counts_the_optimizers_steps(backend, name):
  config = {
    "optimizer": {"class": name},
    "backend": backend,
    "accum_grad_multiple_step": 2,
    "gradient_noise": 0.1,
  }
  tx = optimizers.from_returnn_config(config, 0.1)
  params = jnp.ones(2)
  state = tx.init(params)
  with jax.numpy_dtype_promotion("standard"):  # For optax.
    for _ in range(5):
      _, state = tx.update(params, state, params)
  assert optax.tree.get(state, "global_step") == 2


def test_decouple_constraints_shrinks_weights():
  """Without gradients, by 1 - 2 L2 in each step, and only where there is L2."""
  tx = optimizers.from_returnn_config(
    {"optimizer": {"class": "adam"}, "decouple_constraints": True},
    0.1,
    l2={"layer": 0.01, "bias": None},
  )
  params = {"layer": {"w": jnp.array([1.0, -2.0])}, "bias": jnp.ones(1)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = tx.init(params)
  for _ in range(100):
    updates, state = tx.update(zeros, state, params)
    params = optax.apply_updates(params, updates)
  want = 0.98**100 * np.array([1.0, -2.0])
  np.testing.assert_allclose(params["layer"]["w"], want, rtol=1e-5)
  assert params["bias"] == 1.0
  with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
    tx.update(zeros, state)


def test_l2_must_fit_the_parameters():
  make = functools.partial(
    optimizers.from_returnn_config,
    {"optimizer": {"class": "adam"}, "decouple_constraints": True},
    0.1,
  )
  with pytest.raises(ValueError, match="l2 must be positive or zero, got -1"):
    make(l2={"w": -1})
  with pytest.raises(TypeError, match="l2 must be a finite number"):
    make(l2="0.1")
  params = {"w": jnp.ones(2), "b": jnp.ones(2)}
  tx = make(l2={"w": 0.1})
  with pytest.raises(ValueError, match=r"l2 must be .* a prefix of the param"):
    tx.update(params, tx.init(params), params)
  # One number for all, which may be traced.
  updates = jax.jit(
    lambda l2: make(l2=l2).update(params, tx.init(params), params)
  )
  np.testing.assert_allclose(updates(0.1)[0]["b"], [-0.3, -0.3], rtol=1e-5)


_WHOLE = {
  "optimizer": {"class": "adam"},
  "learning_rate": 0.1,
  "accum_grad_multiple_step": 2,
  "gradient_noise": 0.01,
  "gradient_clip": 1.0,
  "gradient_clip_global_norm": 0.5,
  "gradient_nan_inf_filter": True,
  "grad_norm_to_clip_to_zero": 10.0,
}


@maps.every_map
def test_configured_optimizer_works_on_several_replicas(map_name):
  """After `cross_shard`, each replica has what one has of the mean."""
  own = optimizers.from_returnn_config(_WHOLE)
  both = optax.chain(optax_dist.cross_shard(maps.AXIS), own)
  rng = np.random.RandomState(0)
  given = jnp.asarray(rng.randn(2, 4, 3), jnp.float32)
  start = jnp.ones(3)

  def run(tx, given, params):
    state = tx.init(params)
    for grad in given:
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
    return params

  args = given, maps.Replicated(start)
  got = maps.mapped(map_name, functools.partial(run, both), args, 2)(*args)
  want = run(own, given.mean(axis=0), start)
  for params in got:
    np.testing.assert_allclose(params, want, rtol=1e-5)


# As optax.inject_hyperparams needs it for unlike dtypes.
@jax.numpy_dtype_promotion("standard")
def test_state_keeps_its_types_and_passes_none():
  """Also with None, sparse gradients and injected learning rates."""
  config = _WHOLE | {"gradient_clip_avg_norm": 0.2}
  make = lambda learning_rate: optimizers.from_returnn_config(
    config, learning_rate
  )
  tx = optax.inject_hyperparams(make)(learning_rate=0.1)
  params = {"table": jnp.ones((4, 2)), "none": jnp.ones(2, jnp.bfloat16)}
  slices = optax_dist.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]), (4, 2))
  state = tx.init(params)
  types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  for grads in ({"table": slices, "none": None},) * 2:
    updates, state = tx.update(grads, state, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
  assert updates["none"] is None
  # Adam's first step is the learning rate; the noise decides on other rows.
  np.testing.assert_allclose(updates["table"][1], [-0.1, -0.1], rtol=1e-4)


# As optax's own rules need it.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("name", ["adam", "nadam", "adagrad"])
def test_dtypes_are_kept(backend, name):
  config = {
    "optimizer": {"class": name},
    "backend": backend,
    "accum_grad_multiple_step": 2,
    "gradient_noise": 0.01,
    "gradient_clip": 1.0,
    "gradient_clip_global_norm": 0.5,
  }
  make = lambda rate: optimizers.from_returnn_config(config, rate)
  with jax.enable_x64(True):
    params = {
      name: jnp.ones(3, name) for name in ("bfloat16", "float32", "float64")
    }
    for rate in (0.1, jnp.float32(0.1), optax.linear_schedule(0.1, 0.2, 9)):
      tx = make(rate)
      state = tx.init(params)
      updates, new = jax.eval_shape(tx.update, params, state, params)
      kind = lambda x: (x.shape, x.dtype)
      assert jax.tree.map(kind, updates) == jax.tree.map(kind, params)
      assert jax.tree.map(kind, new) == jax.tree.map(kind, state)
