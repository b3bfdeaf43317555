"""Tests of proximal gradient descent and Adagrad."""

import jax.numpy as jnp
import pytest

from optax_dist import optimizers, sparse

_BOTH = [optimizers.proximal_gradient_descent, optimizers.proximal_adagrad]


@pytest.mark.parametrize("make", _BOTH)
def test_new_values_of_zero_are_exact(make):
  """Rules that compute the new value give its difference: exact at zero."""
  params = jnp.array([0.1, -1e4, 1e-20, 3.0])
  optimizer = make(1.0, l1_regularization_strength=1e5)
  updates, _ = optimizer.update(jnp.zeros(4), optimizer.init(params), params)
  assert not sparse.apply_updates(params, updates).any()


def test_proximal_rules_need_the_parameters():
  for make in _BOTH:
    optimizer = make(0.1)
    params = jnp.ones(2)
    with pytest.raises(ValueError, match="reads the parameters"):
      optimizer.update(params, optimizer.init(params))
