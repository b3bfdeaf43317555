"""Arguments and state that every transform checks and keeps for its inner transform."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist._internal.inner import check_used, checked


def _check(update, known=(), **extra_args):
  check_used("it", update, (jnp.ones(2),), extra_args, known)


@pytest.mark.parametrize(
  "use",
  [
    lambda g, x: x(g),
    lambda g, x: g * x["a"],
    lambda g, x: g * x.real,
    lambda g, x: g if getattr(x, "ndim", 0) else -g,
    lambda g, x: g if x else -g,
    lambda g, x: g if not x else -g,
    lambda g, x: g if x == "nesterov" else -g,
    lambda g, x: g if x != 3 else -g,
    lambda g, x: g if x in ("a", "b") else -g,
    lambda g, x: {"a": g}[x],
    lambda g, x: sum(x, g),
    lambda g, x: g * round(x),
    lambda g, x: (g, x),
    lambda g, x: jax.lax.cond(x, lambda: g, lambda: -g),
    lambda g, x: jax.jit(jnp.multiply)(g, x),
  ],
)
def test_every_use_of_an_argument_is_found(use):
  _check(lambda g, x: use(g, x), x=0.5)


def test_use_of_an_argument_may_depend_on_another():
  """Which argument is used may depend on another one."""

  def update(g, mode, scale, shift):
    return g * scale if mode == "scale" else g + shift

  for mode, unused in (("scale", "shift"), ("shift", "scale")):
    with pytest.raises(TypeError, match=f"argument '{unused}', which neither"):
      _check(update, mode=mode, scale=2.0, shift=1.0)


def test_other_errors_of_the_update_are_left_to_the_update():
  def update(g, **extra_args):
    raise ValueError("needs the parameters")

  _check(update, arived=True)


def test_arguments_of_every_training_loop_cost_nothing():
  """They are not even traced."""
  calls = []
  _check(lambda g, **extra_args: calls.append(g), value=1.0, grad=jnp.ones(2))
  assert not calls


def test_only_a_similar_name_is_suggested():
  update = lambda g, **extra_args: g
  for name, hint in (("arived", True), ("temperature", False)):
    with pytest.raises(TypeError) as caught:
      _check(update, known=("arrived", "local_step"), **{name: 1.0})
    assert ("Did you mean `arrived`?" in str(caught.value)) == hint


def test_momentum_survives_a_step_without_a_gradient():
  tx = checked("it", optax.trace(0.5), ("data",))
  state = tx.init({"w": jnp.zeros(1)})
  for gradient, expected in ((1.0, 1.0), (None, 1.0), (1.0, 1.5)):
    inputs = None if gradient is None else jnp.full(1, gradient)
    updates, state = tx.update({"w": inputs}, state)
    assert (updates["w"] is None) == (inputs is None)
    np.testing.assert_allclose(state.trace["w"], [expected])
