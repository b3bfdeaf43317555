"""Complex gradients: a step turns with the gradient, or there is no rule."""

import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices, apply_updates

REFUSED = (
  "adadelta",
  "adagrad_da",
  "ftrl",
  "neural_optimizer1",
  "proximal_adagrad",
  "proximal_gradient_descent",
)
SUPPORTED = sorted(set(every_optimizer.BY_NAME) - set(REFUSED))
MORE = {
  "rmsprop(centered)": lambda rate: optimizers.rmsprop(
    rate, momentum=0.5, centered=True
  ),
  "keras RMSprop(centered)": lambda rate: optimizers.keras(
    "RMSprop", learning_rate=rate, centered=True
  ),
  "keras RMSprop(momentum)": lambda rate: optimizers.keras(
    "RMSprop", learning_rate=rate, centered=True, momentum=0.5
  ),
  "keras Adam(amsgrad)": lambda rate: optimizers.keras(
    "Adam", learning_rate=rate, amsgrad=True
  ),
  "keras SGD(momentum)": lambda rate: optimizers.keras(
    "SGD", learning_rate=rate, momentum=0.5, nesterov=True
  ),
}
FACTORIES = {
  **{name: every_optimizer.BY_NAME[name] for name in SUPPORTED},
  **MORE,
}
_TURN = np.complex64(np.exp(0.7j))


def _run(factory, gradients):
  """Returns a parameter with dense gradients, and one with sparse ones."""
  optimizer = factory(0.1)
  zeros = jnp.zeros((4, 2), gradients[0].dtype)
  params = {"dense": zeros, "sparse": zeros}
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for gradient in gradients:
    slices = IndexedSlices(gradient[:3], jnp.array([3, 0, 3]), (4, 2))
    updates, state = update(
      {"dense": gradient, "sparse": slices}, state, params
    )
    params = apply_updates(params, updates)
  return jax.tree.map(np.asarray, params)


@jax.numpy_dtype_promotion("standard")  # optax's squares are real.
@pytest.mark.parametrize("name", FACTORIES)
def test_steps_turn_with_the_gradient(name):
  rng = np.random.default_rng(0)
  real = rng.normal(size=(4, 4, 2)).astype(np.float32)
  want = _run(FACTORIES[name], real)
  got = _run(FACTORIES[name], (real * _TURN).astype(np.complex64))
  for kind, turned in got.items():
    assert np.abs(want[kind]).max() > 1e-4
    np.testing.assert_allclose(turned, want[kind] * _TURN, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "custom_adam", "nadam", "keras_adam"])
def test_the_minimum_is_found(name):
  optimizer = every_optimizer.BY_NAME[name](0.05)
  target = 1 + 2j

  @jax.jit
  def step(_, carry):
    param, state = carry
    # JAX's gradient of a real function of a complex number is conjugate to the
    # direction of steepest ascent, for optax too.
    gradient = jnp.conj(jax.grad(lambda w: jnp.abs(w - target) ** 2)(param))
    updates, state = optimizer.update(gradient, state, param)
    return apply_updates(param, updates), state

  start = jnp.zeros((), jnp.complex64)
  carry = start, optimizer.init(start)
  param, _ = jax.lax.fori_loop(0, 1000, step, carry)
  np.testing.assert_allclose(param, target, atol=1e-2)


@pytest.mark.parametrize("name", REFUSED)
def test_rules_without_complex_form_refuse_complex_parameters(name):
  optimizer = every_optimizer.BY_NAME[name](0.1)
  message = (
    rf"{name} has no rule for complex.*\['w'\] is complex64.*split_real_and"
  )
  params = {"b": jnp.zeros(2), "w": jnp.zeros(2, jnp.complex64)}
  with pytest.raises(TypeError, match=message):
    optimizer.init(params)
  state = optimizer.init({"b": jnp.zeros(2), "w": jnp.zeros(2)})
  with pytest.raises(TypeError, match=message):
    optimizer.update(params, state, {"b": jnp.zeros(2), "w": jnp.zeros(2)})


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_gradient_of_a_real_parameter_is_real(name):
  optimizer = every_optimizer.BY_NAME[name](0.1)
  params = jnp.zeros(2)
  with pytest.raises(TypeError, match="must be real, got complex64"):
    optimizer.update(
      jnp.zeros(2, jnp.complex64), optimizer.init(params), params
    )
