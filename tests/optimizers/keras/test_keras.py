"""Tests of the legacy Keras optimizers by name, and of their arguments."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.optimizers.keras import KERAS_NAMES, keras_arguments


def test_invalid_arguments_are_refused():
  with pytest.raises(ValueError, match="one of SGD, RMSprop, Adagrad, Adam"):
    optimizers.keras("Adadelta2")
  with pytest.raises(ValueError, match=r"among learning_rate.*got rho"):
    optimizers.keras("Adam", rho=0.9)
  with pytest.raises(ValueError, match="`frozen_iterations` must be True or"):
    optimizers.keras("Adam", frozen_iterations="no")


@pytest.mark.parametrize("name", KERAS_NAMES)
def test_arguments_have_their_names_in_keras(name):
  known = keras_arguments(name)
  assert known[0] == "learning_rate"
  assert "frozen" not in known


@pytest.mark.parametrize("name", KERAS_NAMES)
def test_the_case_of_a_name_does_not_matter(name):
  grads = jnp.array([0.5, -2.0])
  updates = []
  for spelt in (name, name.lower(), name.upper()):
    optimizer = optimizers.keras(spelt, learning_rate=0.5)
    updates.append(optimizer.update(grads, optimizer.init(grads))[0])
    assert keras_arguments(spelt) == keras_arguments(name)
  assert np.abs(updates[0]).min() > 0
  np.testing.assert_array_equal(updates, [updates[0]] * 3)
