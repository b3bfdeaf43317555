"""Optimizers by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.cli import errors
from optax_dist.cli.train import optimizer


@pytest.mark.parametrize("name", optimizer.LEARNING_RATES)
def test_the_learning_rate_falls_along_a_half_cosine(name):
  steps, gradient = 8, jnp.ones(())
  made = optimizer.make(name, 0.5, steps)
  state = made.init(gradient)
  updates = []
  for _ in range(steps + 1):
    update, state = made.update(gradient, state, gradient)
    updates.append(float(update))
  cosine = 0.25 * (1 + np.cos(np.pi * np.arange(steps + 1) / steps))
  # Of a gradient that is always 1: Adam's direction is 1 too, and momentum's is
  # a geometric sum.
  direction = np.ones(steps + 1)
  if name == "momentum":
    direction = np.cumsum(0.9 ** np.arange(steps + 1))
  np.testing.assert_allclose(updates, -cosine * direction, atol=1e-5)


def test_every_registered_optimizer_has_a_learning_rate():
  assert set(optimizer.LEARNING_RATES) <= set(optimizers.REGISTRY)
  for name in optimizers.REGISTRY:
    optimizer.check(name)
    assert optimizer.default_learning_rate(name) > 0


def test_an_unknown_name_is_refused():
  with pytest.raises(errors.CommandError, match=r"'adma' is not one of .*adam"):
    optimizer.check("adma")
  with pytest.raises(ValueError, match="'adma'"):
    optimizer.make("adma", 0.1, 1)
