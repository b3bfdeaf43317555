"""Tests that invalid hyperparameters are refused at construction, by name."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.optimizers.keras import KERAS_NAMES, keras_arguments

_KERAS_FLAGS = ("nesterov", "centered", "amsgrad")


def _factories():
  """All that take a learning rate, by name, with what else they need."""
  result = {f"keras {name}": (optimizers.keras, name) for name in KERAS_NAMES}
  for name in optimizers.__all__:
    function = getattr(optimizers, name)
    if inspect.isfunction(function) and name not in (
      *(
        "keras",
        "from_returnn_config",
        "returnn_class_names",
        "returnn_learning_rates",
      ),
    ):
      result[name] = (function,)
  rule = lambda grad, param, slots, step: (-step.learning_rate * grad, slots)
  result["base_custom"] += (rule,)
  return {name: functools.partial(*parts) for name, parts in result.items()}


_FACTORIES = _factories()


def _hyperparameters(flags):
  """The factory and the name of each number, or of each flag."""
  result = []
  for name, factory in _FACTORIES.items():
    if name.startswith("keras "):
      result += [
        (name, argument)
        for argument in keras_arguments(name.removeprefix("keras "))
        if (argument in _KERAS_FLAGS) == flags
      ]
      continue
    if name == "base_custom":
      result += [] if flags else [(name, "learning_rate")]
      continue
    result += [
      (name, parameter.name)
      for parameter in inspect.signature(factory).parameters.values()
      if isinstance(parameter.default, bool) == flags
      and parameter.kind is not parameter.VAR_KEYWORD
    ]
  return result


_NUMBERS = _hyperparameters(flags=False)
_FLAGS = _hyperparameters(flags=True)


def _make(name, **arguments):
  needed = {
    parameter.name: 0.5
    for parameter in inspect.signature(_FACTORIES[name]).parameters.values()
    if parameter.default is parameter.empty
    and parameter.kind is not parameter.VAR_KEYWORD
  }
  return _FACTORIES[name](**(needed | arguments))


def test_the_numbers_and_flags_are_found():
  for expected in ("adam", "beta1"), ("base_custom", "learning_rate"):
    assert expected in _NUMBERS
  assert ("keras SGD", "momentum") in _NUMBERS
  assert len(_NUMBERS) > 80
  assert {("momentum", "use_nesterov"), ("keras SGD", "nesterov")} <= {*_FLAGS}


@pytest.mark.parametrize(("name", "parameter"), _NUMBERS)
def test_invalid_numbers_are_refused(name, parameter):
  for value, error in (
    ("0.1", TypeError),
    (1j, TypeError),
    (True, TypeError),
    ([0.1], TypeError),
    (float("nan"), ValueError),
    (-float("inf"), ValueError),
    (np.float32("nan"), ValueError),
    (np.array([0.1, 0.2]), ValueError),
  ):
    with pytest.raises(error, match=f"^{re.escape(parameter)} must be"):
      _make(name, **{parameter: value})


@pytest.mark.parametrize(("name", "parameter"), _FLAGS)
def test_invalid_flags_are_refused(name, parameter):
  with pytest.raises(ValueError, match=f"`{parameter}` must be True or False"):
    _make(name, **{parameter: "no"})


@pytest.mark.parametrize("name", _FACTORIES)
def test_numbers_arrays_and_schedules_are_learning_rates(name):
  numbers = (0.1, 1, np.float32(0.1), np.array(0.1), jnp.float32(0.1))
  not_positive = () if name == "ftrl" else (-0.1, 0)
  for rate in (*numbers, *not_positive, optax.constant_schedule(0.1)):
    _make(name, learning_rate=rate)
  jax.eval_shape(
    lambda rate: _make(name, learning_rate=rate).init(jnp.zeros(2)),
    jnp.float32(0.1),
  )
  with pytest.raises(
    TypeError, match=r"^learning_rate must be a finite number"
  ):
    _make(name, learning_rate=None)
