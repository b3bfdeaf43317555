"""Tests of hyperparameters: traced ones, and leaves of several dtypes."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices

# All of their hyperparameters but the learning rate.
_MAKERS = {
  "adadelta": functools.partial(optimizers.adadelta, rho=0.75, epsilon=0.125),
  "adagrad": functools.partial(
    optimizers.adagrad, initial_accumulator_value=0.5
  ),
  "adagrad_da": functools.partial(
    optimizers.adagrad_da,
    initial_gradient_squared_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    global_step_start=2,
  ),
  "adam": functools.partial(
    optimizers.adam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "amsgrad": functools.partial(
    optimizers.amsgrad, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "amsgrad decay": functools.partial(
    lambda **numbers: optimizers.amsgrad(decay=True, **numbers), epsilon=0.125
  ),
  "custom_adam": functools.partial(
    optimizers.custom_adam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "ftrl": functools.partial(
    optimizers.ftrl,
    learning_rate_power=-0.75,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
    l2_shrinkage_regularization_strength=0.5,
    beta=0.25,
  ),
  "gradient_descent": optimizers.gradient_descent,
  "grad_variance_scaled": functools.partial(
    optimizers.grad_variance_scaled, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "keras adagrad": functools.partial(
    optimizers.keras, "Adagrad", initial_accumulator_value=0.5, epsilon=0.125
  ),
  "keras adam": functools.partial(
    optimizers.keras, "Adam", beta_1=0.75, beta_2=0.5, epsilon=0.125
  ),
  "keras adamax": functools.partial(
    optimizers.keras, "Adamax", beta_1=0.75, beta_2=0.5, epsilon=0.125
  ),
  "keras nadam": functools.partial(
    optimizers.keras,
    "Nadam",
    beta_1=0.75,
    beta_2=0.5,
    epsilon=0.125,
    schedule_decay=0.5,
  ),
  "keras rmsprop": functools.partial(
    optimizers.keras, "RMSprop", rho=0.75, epsilon=0.125
  ),
  "keras rmsprop momentum": functools.partial(
    optimizers.keras, "RMSprop", rho=0.75, epsilon=0.125, momentum=0.5
  ),
  "keras sgd": functools.partial(
    optimizers.keras, "SGD", momentum=0.5, decay=0.5
  ),
  "momentum": functools.partial(optimizers.momentum, momentum=0.5),
  "momentum nesterov": functools.partial(
    lambda **numbers: optimizers.momentum(use_nesterov=True, **numbers),
    momentum=0.5,
  ),
  "nadam": functools.partial(
    optimizers.nadam, beta1=0.75, beta2=0.5, epsilon=0.125
  ),
  "neural_optimizer1": functools.partial(
    optimizers.neural_optimizer1, beta1=0.75, decrease_factor=0.25
  ),
  "proximal_adagrad": functools.partial(
    optimizers.proximal_adagrad,
    initial_accumulator_value=0.5,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
  ),
  "proximal_gradient_descent": functools.partial(
    optimizers.proximal_gradient_descent,
    l1_regularization_strength=0.125,
    l2_regularization_strength=0.25,
  ),
  "rmsprop": functools.partial(
    optimizers.rmsprop, decay=0.75, momentum=0.5, epsilon=0.125
  ),
  "rmsprop centered": functools.partial(
    lambda **numbers: optimizers.rmsprop(centered=True, **numbers),
    decay=0.75,
    epsilon=0.125,
  ),
}


@pytest.mark.parametrize("name", _MAKERS)
def test_traced_numbers_act_like_plain_ones_for_mixed_dtypes(name):
  """As `optax.inject_hyperparams` gives them: float32, whatever the leaf is."""
  make = functools.partial(_MAKERS[name], learning_rate=0.25)
  numbers = make.keywords
  grads = {
    dtype: jnp.array([0.5, -2.0], dtype) for dtype in ("bfloat16", "float32")
  }

  def two_updates(optimizer):
    state = optimizer.init(grads)
    updates, new = optimizer.update(grads, state, grads)
    kinds = [
      jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (new, state)
    ]
    assert kinds[0] == kinds[1]
    return [updates, optimizer.update(grads, new, grads)[0]]

  kind = lambda x: np.int32 if isinstance(x, int) else np.float32
  both = jax.jit(lambda n: (two_updates(make(**n)), two_updates(make())))
  traced, plain = both({key: kind(x)(x) for key, x in numbers.items()})
  for got, want in zip(traced, plain, strict=True):
    for dtype, rtol in (("float32", 1e-5), ("bfloat16", 2e-2)):
      assert got[dtype].dtype == dtype
      np.testing.assert_allclose(
        np.float32(got[dtype]), np.float32(want[dtype]), rtol=rtol
      )


@pytest.mark.parametrize(
  "make",
  [
    functools.partial(make, **{name: strength})
    for make, name in (
      (optimizers.adagrad_da, "l1_regularization_strength"),
      (optimizers.ftrl, "l1_regularization_strength"),
      (optimizers.ftrl, "l2_shrinkage_regularization_strength"),
      (optimizers.ftrl, "learning_rate_power"),
      (optimizers.proximal_adagrad, "l1_regularization_strength"),
      (optimizers.proximal_gradient_descent, "l1_regularization_strength"),
    )
    for strength in (0.0, -0.05 if name == "learning_rate_power" else 0.05)
  ],
  ids=lambda make: f"{make.func.__name__} {make.keywords}",
)
def test_traced_zero_is_applied(make):
  params, grads = jnp.array([1.0, -1.0]), jnp.array([0.3, 0.2])
  ((name, strength),) = make.keywords.items()
  plain, traced = make(0.1), make(0.1, **{name: jnp.float32(strength)})
  want, _ = plain.update(grads, plain.init(params), params)
  got, _ = traced.update(grads, traced.init(params), params)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def _equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for sub in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _equations(sub)


@pytest.mark.parametrize("name", _MAKERS)
def test_float64_parameters_are_not_rounded_on_the_way(name):
  """The recordings of the originals are float32, and do not show it."""
  with jax.enable_x64(True):
    params = {"dense": jnp.ones((2, 3)), "table": jnp.ones((5, 2))}
    rows = IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 4, 1]), (5, 2))
    grads = {"dense": params["dense"], "table": rows}
    for rate in (0.25, lambda count: jnp.float64(0.25)):
      optimizer = _MAKERS[name](learning_rate=rate)
      state = optimizer.init(params)
      program = jax.make_jaxpr(optimizer.update)(grads, state, params)
      for equation in _equations(program.jaxpr):
        dtypes = {x.aval.dtype.name for x in equation.invars}
        for out in equation.outvars:
          narrow = out.aval.dtype == np.float32
          assert not (narrow and out.aval.ndim), equation
          assert not (narrow and "float64" in dtypes), equation


@pytest.mark.parametrize("name", ["amsgrad decay", "keras sgd"])
@pytest.mark.parametrize(
  "rate", [np.float64(0.25), np.float32(0.25), lambda t: jnp.float64(0.25)]
)
def test_a_divided_rate_may_be_of_another_dtype(name, rate):
  def two_updates(rate):
    optimizer = _MAKERS[name](learning_rate=rate)
    _, state = optimizer.update(params, optimizer.init(params), params)
    return optimizer.update(params, state, params)[0]

  with jax.enable_x64(True):
    params = {dtype: jnp.ones(2, dtype) for dtype in ("float32", "float64")}
    want, got = two_updates(0.25), two_updates(rate)
    for dtype in params:
      assert got[dtype].dtype == dtype
      np.testing.assert_allclose(got[dtype], want[dtype], rtol=1e-6)
