"""Tests that unused keyword arguments are refused, except optax's own."""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist._internal.extra_args import check_used

N = 2
every_kind = pytest.mark.parametrize("kind", every_transform.NAMES)


def _update(tx, **extra):
  params = jnp.ones(3)
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  return jax.vmap(
    lambda g, s: tx.update(g, s, params, **extra),
    in_axes=(0, axes),
    out_axes=(0, axes),
    axis_name=maps.AXIS,
  )(jnp.ones((N, 3)), state)[0]


@every_kind
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.scale(0.1)])
def test_arguments_that_no_transform_uses_are_refused(kind, inner):
  with pytest.raises(TypeError, match=f"{kind}: .* argument 'arived'"):
    _update(every_transform.make(kind, inner, N), arived=True)


@pytest.mark.parametrize("kind", every_transform.NAMES[1:])
@pytest.mark.parametrize("name", ["arrived", "local_step"])
def test_other_transforms_refuse_the_arguments_of_sync_replicas(kind, name):
  with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
    _update(every_transform.make(kind, optax.sgd(0.1), N), **{name: True})


def test_a_misspelt_argument_is_corrected():
  with pytest.raises(TypeError, match=r"Did you mean `arrived`\?"):
    _update(
      every_transform.make("sync_replicas", optax.sgd(0.1), N), arived=True
    )


@every_kind
def test_the_arguments_of_optaxs_training_loops_are_accepted(kind):
  _update(
    every_transform.make(kind, optax.sgd(0.1), N),
    value=jnp.float32(1),
    grad=jnp.ones(3),
    value_fn=jnp.sum,
  )


def _scaled_by_argument(read):
  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(),
    lambda g, state, params=None, **extra: (
      jax.tree.map(lambda g: read(extra) * g, g),
      state,
    ),
  )


@every_kind
@pytest.mark.parametrize(
  "read",
  [
    lambda extra: extra["factor"],
    lambda extra: jnp.asarray(extra.get("factor")),
    lambda extra: jnp.where(extra["factor"] > 1, 3.0, 1.0),
  ],
)
def test_arguments_reach_an_inner_transformation_that_uses_them(kind, read):
  """Wherever it is: the signatures of a chain and of what is in it say nothing."""
  inner = optax.chain(optax.scale(1.0), _scaled_by_argument(read))
  updates = _update(every_transform.make(kind, inner, N), factor=jnp.float32(3))
  np.testing.assert_array_equal(updates, 3.0)


def test_arrived_goes_through_to_replicas_within_replicas():
  inner = optax_dist.sync_replicas(
    optax.sgd(1.0), "in", replicas_to_aggregate=2, total_num_replicas=2
  )
  tx = optax_dist.local_sgd(
    inner, "out", num_replicas=2, communication_period=4
  )

  def step(arrived):
    state = tx.init(jnp.zeros(3))
    updates, state = tx.update(
      jnp.ones(3), state, jnp.zeros(3), arrived=arrived
    )
    return updates

  both = jax.vmap(jax.vmap(step, axis_name="in"), axis_name="out")
  updates = both(jnp.array([[True, True], [True, False]]))
  np.testing.assert_array_equal(updates[:, :, 0], [[-1, -1], [0, 0]])


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
def test_every_use_counts(use):
  _check(lambda g, x: use(g, x), x=0.5)


def test_the_use_of_an_argument_may_depend_on_another():
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
  """Not even a trace."""
  calls = []
  _check(lambda g, **extra_args: calls.append(g), value=1.0, grad=jnp.ones(2))
  assert not calls


def test_only_a_similar_name_is_suggested():
  update = lambda g, **extra_args: g
  for name, hint in (("arived", True), ("temperature", False)):
    with pytest.raises(TypeError) as caught:
      _check(update, known=("arrived", "local_step"), **{name: 1.0})
    assert ("Did you mean `arrived`?" in str(caught.value)) == hint
