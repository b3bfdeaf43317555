"""Tests of Adagrad, its dual averaging form and Adadelta."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers


def test_adagrad_da_takes_the_global_step():
  arguments = {"l2_regularization_strength": 0.5}
  late = optimizers.adagrad_da(0.1, global_step_start=7, **arguments)
  inputs = optimizers.adagrad_da(0.1, **arguments)
  params = jnp.ones(2)
  want, _ = late.update(params, late.init(params), params)
  got, _ = inputs.update(params, inputs.init(params), params, global_step=7)
  assert got.tolist() == want.tolist()
  other, _ = inputs.update(params, inputs.init(params), params)
  assert other.tolist() != want.tolist()


def test_adagrad_da_ignores_its_starting_point():
  """The parameter is a function of all gradients, even if the latest is absent."""
  params = jnp.array([7.0, -0.3, 1e4])
  optimizer = optimizers.adagrad_da(0.5)
  grads = jnp.array([0.0, 0.0, 0.3])
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  want = [0.0, 0.0, -0.5 * 0.3 / np.sqrt(0.1 + 0.3**2)]
  np.testing.assert_allclose(params + updates, want, atol=2e-3)
  assert not (params + updates)[:2].any()


def test_adagrad_da_needs_the_parameters():
  optimizer = optimizers.adagrad_da(0.1)
  params = jnp.ones(2)
  with pytest.raises(ValueError, match="reads the parameters"):
    optimizer.update(params, optimizer.init(params))
