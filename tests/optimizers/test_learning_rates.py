"""Tests that invalid learning rates are refused at construction."""

import inspect

import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest

from optax_dist import optimizers

FACTORIES = {
  **every_optimizer.BY_NAME,
  "amsgrad(decay)": lambda rate: optimizers.amsgrad(rate, decay=True),
  "keras_sgd(decay)": lambda rate: optimizers.keras(
    "SGD", learning_rate=rate, decay=0.1
  ),
  "base_custom": lambda rate: optimizers.base_custom(
    lambda grad, param, slots, step: (-step.learning_rate * grad, slots),
    learning_rate=rate,
  ),
}


_REFUSED = [
  (float("nan"), ValueError),
  (float("inf"), ValueError),
  (-float("inf"), ValueError),
  (np.float32("nan"), ValueError),
  (None, TypeError),
  ("0.1", TypeError),
  (True, TypeError),
  (1j, TypeError),
  ([0.1], TypeError),
  (np.array([0.1, 0.2]), ValueError),
  (np.array(np.nan), ValueError),
]


@pairwise.every_value(
  name=list(FACTORIES), refused={repr(rate[0]): rate for rate in _REFUSED}
)
def test_an_invalid_learning_rate_is_refused(name, refused):
  rate, error = refused
  with pytest.raises(error, match=r"^learning_rate must be a finite number"):
    FACTORIES[name](rate)


@pytest.mark.parametrize("name", FACTORIES)
def test_numbers_arrays_and_schedules_are_accepted(name):
  numbers = (0.1, 1, np.float32(0.1), np.array(0.1), jnp.float32(0.1))
  not_positive = () if name == "ftrl" else (-0.1, 0)
  for rate in (*numbers, *not_positive, optax.constant_schedule(0.1)):
    FACTORIES[name](rate)
  jax.eval_shape(
    lambda rate: FACTORIES[name](rate).init(jnp.zeros(2)), jnp.float32(0.1)
  )


def test_every_factory_is_here():
  made = {
    name
    for name in optimizers.__all__
    if inspect.isfunction(function := getattr(optimizers, name))
    and "learning_rate" in inspect.signature(function).parameters
  }
  assert made - {"from_returnn_config"} <= set(FACTORIES)
