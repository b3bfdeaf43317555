"""Tests that invalid hyperparameters are refused at construction, by name."""

import inspect
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers

# Functions that take the name of an optimizer, or a configuration.
_OTHERS = {"name", "config"}


def _hyperparameters(flags):
  """Each of a function's hyperparameters: numbers, or flags."""
  found = []
  for name in optimizers.__all__:
    function = getattr(optimizers, name)
    if not inspect.isfunction(function) or name == "base_custom":
      continue
    parameters = inspect.signature(function).parameters
    if "learning_rate" not in parameters or parameters.keys() & _OTHERS:
      continue
    found += [
      (name, parameter.name)
      for parameter in parameters.values()
      if parameter.name != "learning_rate"
      and isinstance(parameter.default, bool) == flags
      and parameter.kind is not parameter.VAR_KEYWORD
    ]
  return found


_NUMBERS = _hyperparameters(flags=False)
_FLAGS = _hyperparameters(flags=True)


def _make(name, **arguments):
  function = getattr(optimizers, name)
  needed = {
    parameter.name: 0.5
    for parameter in inspect.signature(function).parameters.values()
    if parameter.default is parameter.empty
  }
  return function(**(needed | arguments))


def test_the_numeric_parameters_of_optimizers_are_found():
  assert ("adam", "beta1") in _NUMBERS
  assert ("momentum", "momentum") in _NUMBERS
  assert len(_NUMBERS) > 30
  assert ("momentum", "use_nesterov") in _FLAGS


@pytest.mark.parametrize(("name", "parameter"), _NUMBERS)
def test_invalid_numbers_are_refused(name, parameter):
  for value, error in (
    ("0.1", TypeError),
    (1j, TypeError),
    (True, TypeError),
    ([0.1], TypeError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (np.array([0.1, 0.2]), ValueError),
  ):
    with pytest.raises(error, match=f"^{re.escape(parameter)} must be"):
      _make(name, **{parameter: value})


@pytest.mark.parametrize(("name", "parameter"), _FLAGS)
def test_invalid_flags_are_refused(name, parameter):
  with pytest.raises(ValueError, match=f"`{parameter}` must be True or False"):
    _make(name, **{parameter: "no"})


def test_numbers_and_arrays_are_taken():
  for value in (0.5, np.float32(0.5), jnp.float32(0.5), np.array(0.5)):
    optimizers.adam(0.1, beta1=value)
    optimizers.ftrl(0.1, beta=value)
  optax.inject_hyperparams(optimizers.adam)(0.1).init(jnp.zeros(2))
