"""Tests of the optimizers by name."""

import jax.numpy as jnp
import pytest

from optax_dist import optimizers


@pytest.mark.parametrize("name", optimizers.REGISTRY)
def test_descends(name):
  optimizer = optimizers.by_name(name, 0.1)
  params = jnp.full(2, 2.0)
  # The initial value must not decide: adagrad_da forgets it.
  grads = jnp.array([1.0, 0.5])
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  assert (updates < 0).all()


def test_holds_every_optimizer_but_the_base():
  functions = {
    name
    for name in optimizers.__all__
    if name.islower() and name not in _NOT_OPTIMIZERS
  }
  names = {
    name.split("_")[0] if name.startswith("keras_") else name
    for name in optimizers.REGISTRY
  }
  assert names == functions - {"base_custom"}


_NOT_OPTIMIZERS = (
  "by_name",
  "from_returnn_config",
  "returnn_class_names",
  "row_wise",
)


def test_amsgrad_moves_nothing_without_gradients():
  """By its own default, an epsilon of 0, it would make parameters NaN."""
  optimizer = optimizers.by_name("amsgrad", 0.1)
  zeros = jnp.zeros(2)
  updates, _ = optimizer.update(zeros, optimizer.init(zeros), zeros)
  assert updates.tolist() == [0.0, 0.0]


def test_unknown_name():
  with pytest.raises(ValueError, match=r"one of adadelta, adagrad.*got 'x'"):
    optimizers.by_name("x", 0.1)
