"""Tests of optimizers on parameters of several dtypes, and of those that can't move."""

import warnings

import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers, sparse

_MIXED = {
  "w": jnp.ones((2, 3)),
  "nested": ({"b": jnp.ones(2, jnp.bfloat16)}, None, ()),
  "empty": jnp.ones((0, 2)),
}


@jax.numpy_dtype_promotion("standard")
def test_row_wise_keeps_the_dtypes_of_an_inner_with_injected_hyperparameters():
  """Alone, it makes the momentum of bfloat16 parameters float32."""
  inner = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  kept = []
  for tx in (inner, sparse.row_wise(inner)):
    state = tx.init(_MIXED)
    _, new = tx.update(_MIXED, state, _MIXED)
    kept.append(dtypes(new) == dtypes(state))
  assert kept == [False, True]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
  "name",
  ["adam", "custom_adam", "nadam", "grad_variance_scaled", "neural_optimizer1"],
)
def test_injected_decays_are_not_rounded_to_one(name):
  """In bfloat16 0.999 is 1, and an average that gets 0 of each gradient stays 0."""
  make = getattr(optimizers, name)
  params = jnp.ones(2, jnp.bfloat16)
  result = []
  for tx in (
    make(0.1),
    optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(0.1),
  ):
    state = tx.init(params)
    for _ in range(2):
      updates, state = tx.update(params, state, params)
    result.append(np.asarray(updates, np.float32))
  np.testing.assert_allclose(result[1], result[0], rtol=0.02)


_FIXED = {
  "integers": jnp.arange(3),
  "booleans": jnp.array([True]),
  "key": jax.random.key(0),
}


@pytest.mark.parametrize("kind", _FIXED)
@pytest.mark.parametrize("name", every_optimizer.BY_NAME)
def test_leaves_without_an_update_rule_are_refused_by_name(name, kind):
  """Such an update would change the state's dtypes, and be rounded to nothing."""
  tx = every_optimizer.BY_NAME[name](0.1)
  params = {"w": jnp.ones(2), "layer": [_FIXED[kind]]}
  state = tx.init(params)
  without = {"w": jnp.ones(2), "layer": [None]}
  updates, new = tx.update(without, state, params)
  assert updates["layer"] == [None]
  assert jax.tree.structure(new) == jax.tree.structure(state)
  zeros = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(params)
  wrong = [zeros, without | {"layer": [jnp.ones(3)]}]
  for gradient in wrong:
    with pytest.raises(
      TypeError, match=r"updates\['layer'\]\[0\] is .*Leave it out"
    ):
      tx.update(gradient, state, params)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
  "name", ["adam", "custom_adam", "nadam", "keras_adam", "keras_adamax"]
)
def test_schedules_of_complex_parameters_warn_of_nothing(name):
  params = jnp.ones(2, jnp.complex64)
  result = []
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for rate in (0.1, jnp.float32(0.1), optax.constant_schedule(0.1)):
      tx = every_optimizer.BY_NAME[name](rate)
      result.append(tx.update(params, tx.init(params), params)[0])
  for other in result[1:]:
    np.testing.assert_allclose(other, result[0], rtol=1e-6)


def test_complex_hyperparameters_name_the_remedy():
  make = lambda **kwargs: optax.inject_hyperparams(optimizers.adam, **kwargs)
  params = jnp.ones(2, jnp.complex64)
  with pytest.raises(TypeError, match="a real `hyperparam_dtype`"):
    make()(0.1).init(params)
  make(hyperparam_dtype=jnp.float32)(0.1).init(params)


def test_injecting_into_keras_names_the_remedy():
  tx = optax.inject_hyperparams(optimizers.keras)("Adam", learning_rate=0.1)
  with pytest.raises(ValueError, match="lambda learning_rate: keras\\('Adam'"):
    tx.init(jnp.ones(2))
