"""A parameter without a gradient keeps its part of the state."""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist._internal.steady_state import with_steady_state

SIZE = 2


def test_a_momentum_outlives_a_step_without_a_gradient():
  tx = with_steady_state(optax.trace(0.5))
  state = tx.init({"w": jnp.zeros(1)})
  for gradient, expected in ((1.0, 1.0), (None, 1.0), (1.0, 1.5)):
    given = None if gradient is None else jnp.full(1, gradient)
    updates, state = tx.update({"w": given}, state)
    assert (updates["w"] is None) == (given is None)
    np.testing.assert_allclose(state.trace["w"], [expected])


@pytest.mark.parametrize("name", [*every_transform.NAMES, "sparse_loco"])
def test_parameters_that_are_integers_or_keys_pass_every_transform(name):
  """Their gradient is None; no step changes them, or the state's structure."""
  inner = optax.chain(
    optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.5)
  )
  if name == "sparse_loco":
    tx = optax_dist.sparse_loco(
      inner, maps.AXIS, num_replicas=SIZE, communication_period=2
    )
  else:
    outer = {"outer": optax.sgd(0.5, momentum=0.5)}
    tx = every_transform.make(
      name, inner, SIZE, **outer if name in every_transform.OUTER else {}
    )
  params = {"w": jnp.ones(3), "n": jnp.array([3]), "k": jax.random.key(0)}
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)

  def step(params, state, gradient):
    updates, state = tx.update(
      {"w": gradient, "n": None, "k": None}, state, params
    )
    return optax_dist.apply_updates(params, updates), state

  own = jax.tree.map(lambda x: jnp.stack([x] * SIZE), params)
  is_shared = name in ("sync_replicas", "sharded")
  step = jax.vmap(
    step,
    axis_name=maps.AXIS,
    in_axes=(None if is_shared else 0, axes, 0),
    out_axes=(0, axes),
  )
  given = params if is_shared else own
  shapes = jax.eval_shape(step, given, state, jnp.ones((SIZE, 3)))
  assert jax.tree.structure(shapes) == jax.tree.structure((own, state))
  for a, b in zip(
    jax.tree.leaves(shapes), jax.tree.leaves((own, state)), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
