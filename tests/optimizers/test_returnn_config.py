"""Tests of RETURNN's configurations."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers

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
      optimizers.keras("Nadam", learning_rate=0.1, epsilon=1e-16),
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
def test_config(config, want):
  got = optimizers.from_returnn_config(config, 0.1)
  np.testing.assert_array_equal(_updates(got), _updates(want))


def test_keras_classes_do_not_clip_as_in_returnn():
  config = {"class": "sgd", "clipnorm": 0.5}
  got = optimizers.from_returnn_config(config, 0.1, frozen_iterations=True)
  want = optimizers.keras("SGD", learning_rate=0.1, frozen_iterations=True)
  np.testing.assert_array_equal(_updates(got), _updates(want))
  with pytest.raises(ValueError, match="got clipnorm"):
    optimizers.from_returnn_config(config, 0.1)


def test_global_options():
  got = optimizers.from_returnn_config("momentum", 0.1, momentum=0.7)
  want = optimizers.momentum(0.1, 0.7)
  assert _updates(got).tolist() == _updates(want).tolist()
  got = optimizers.from_returnn_config("adam", 0.1, optimizer_epsilon=1.0)
  want = optimizers.adam(0.1, epsilon=1.0)
  assert _updates(got).tolist() == _updates(want).tolist()


def test_multiplier_of_a_schedule():
  got = optimizers.from_returnn_config(
    {"class": "GradientDescent", "learning_rate_multiplier": 0.5},
    lambda count: jnp.float32(0.25),
  )
  assert _updates(got).tolist() == (-0.125 * _GRAD).tolist()


def test_frozen_iterations_reach_keras():
  free, frozen = (
    optimizers.from_returnn_config(
      {"class": "sgd", "decay": 1.0}, 1.0, frozen_iterations=frozen
    )
    for frozen in (False, True)
  )
  for optimizer, second in ((free, 0.5), (frozen, 1.0)):
    state = optimizer.init(_GRAD)
    _, state = optimizer.update(_GRAD, state)
    updates, _ = optimizer.update(_GRAD, state)
    assert updates.tolist() == (-second * _GRAD).tolist()


@pytest.mark.parametrize("name", optimizers.returnn_class_names())
def test_every_class_by_all_its_names(name):
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
    ({"beta1": 0.9}, "must have a 'class', one of"),
    ({"class": "momentum"}, "momentum needs the arguments momentum"),
    ({"class": "BaseCustom"}, "abstract"),
    ({"class": None}, "got None"),
    ({"class": "adagrad", "epsilon": 1.0}, "got epsilon"),
    (None, "config must be the name of a class, or a mapping .* got None"),
  ],
)
def test_errors(config, message):
  with pytest.raises(ValueError, match=message):
    optimizers.from_returnn_config(config, 0.1)
