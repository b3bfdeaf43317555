"""Valid learning rates; test_every_argument.py has invalid ones."""

import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest


@pytest.mark.parametrize("name", every_optimizer.BY_NAME)
def test_numbers_arrays_and_schedules_are_learning_rates(name):
  make = every_optimizer.BY_NAME[name]
  numbers = (0.1, 1, np.float32(0.1), np.array(0.1), jnp.float32(0.1))
  not_positive = () if name == "ftrl" else (-0.1, 0)
  for rate in (*numbers, *not_positive, optax.constant_schedule(0.1)):
    make(rate)
  jax.eval_shape(lambda rate: make(rate).init(jnp.zeros(2)), jnp.float32(0.1))
  with pytest.raises(
    TypeError, match=r"^learning_rate must be a finite number"
  ):
    make(None)
