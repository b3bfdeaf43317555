"""Tests of steps that are taken or not, with a state that stays in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist._internal.leaves.keep_unless import keep_unless

_TRANSFORMS = {
  "momentum": optax.sgd(0.1, momentum=0.9),
  "adam": optax.adam(1e-2),
  "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-2)),
  "injected": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
  "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
  "without a state": optax.scale(2.0),
}


def _step(tx, taken):
  params = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(())}
  gradient = jax.tree.map(jnp.cos, params)
  nothing = jax.tree.map(jnp.zeros_like, params)
  before = tx.init(params)

  @jax.jit
  def step(gradient, state, taken):
    update = lambda: tx.update(gradient, state, params)
    return keep_unless(taken, update, nothing, state), update()

  kept, applied = step(gradient, before, taken)
  return kept, applied if taken else (nothing, before)


@jax.numpy_dtype_promotion("standard")  # Which some of optax need.
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("name", _TRANSFORMS)
def test_the_step_or_what_was(name, taken):
  got, want = _step(_TRANSFORMS[name], jnp.asarray(taken))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_update_is_computed_from_the_state_that_is_kept():
  def step(x, state, taken):
    new = state + x
    return keep_unless(taken, lambda: (jnp.sin(new * 1), new * 1), x, state)

  def chosen_first(x, state, taken):
    def update():
      new = state + x
      return jnp.sin(new), new

    return keep_unless(taken, update, x, state)

  order = lambda fun: [
    eqn.primitive.name
    for eqn in jax.make_jaxpr(fun)(jnp.ones(2), jnp.ones(2), True).eqns
    if eqn.primitive.name in ("sin", "select_n")
  ]
  assert order(chosen_first) == ["select_n", "sin", "select_n"]
  # Here the update is not made of what is stored.
  assert order(step)[-1] == "select_n"
  assert len(order(step)) == 3


@pytest.mark.parametrize("taken", [True, False])
def test_a_value_that_is_stored_twice_and_one_that_is_not_computed(taken):
  x, first, second = jnp.ones(2), jnp.full(2, 3.0), jnp.full(2, 4.0)

  def update():
    twice = x + first
    return x, (twice, twice, x, jnp.zeros(2))

  old = (first, second, jnp.full(2, 5.0), jnp.full(2, 6.0))
  got = keep_unless(jnp.asarray(taken), update, jnp.zeros(2), old)
  want = update() if taken else (jnp.zeros(2), old)
  jax.tree.map(np.testing.assert_array_equal, got, want)
