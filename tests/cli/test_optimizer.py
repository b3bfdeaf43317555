"""Optimizers by name."""

import jax
import numpy as np
import pytest

from optax_dist.cli import optimizer


@pytest.mark.parametrize("name", optimizer.names())
def test_the_learning_rate_falls_along_a_half_cosine(name):
  steps, gradient = 8, np.float32(1.0)
  made = optimizer.make(name, 0.5, steps)
  state = made.init(gradient)
  updates = []
  for _ in range(steps + 1):
    # Optax's Adam does not work under strict promotion; the others do.
    with jax.numpy_dtype_promotion("standard" if name == "adam" else "strict"):
      update, state = made.update(gradient, state)
    updates.append(float(update))
  cosine = 0.25 * (1 + np.cos(np.pi * np.arange(steps + 1) / steps))
  # Of a gradient that is always 1: Adam's direction is 1 too, and momentum's is
  # a geometric sum.
  direction = np.ones(steps + 1)
  if name == "momentum":
    direction = np.cumsum(0.9 ** np.arange(steps + 1))
  np.testing.assert_allclose(updates, -cosine * direction, atol=1e-5)


def test_an_unknown_name_is_refused():
  with pytest.raises(ValueError, match=r"adam.*got 'adma'"):
    optimizer.make("adma", 0.1, 1)
