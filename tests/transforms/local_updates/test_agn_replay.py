"""Replays TensorFlow's AGNOptimizer: accumulated gradients, normalized.

Workers train parameters of their own and accumulate their gradients; at the end
of a period one step by what is accumulated moves the shared parameters, and the
workers go on from there. With an inner Adam without memory, which looks at
signs only, this is `local_updates` with an outer Adam; the accumulated gradient
and the step by it are `sync_replicas` with as many gradients as the period has.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scenario_recordings as recorded

import optax_dist
from optax_dist import optimizers

_IDS = recorded.ids(*recorded.AGN)


def _config(id):
  config = recorded.RECORDINGS[id]["config"]
  rate, *betas = map(
    float, re.fullmatch(r"Adam\((.*)\)", config["inner"])[1].split(",")
  )
  assert betas == [0.0, 0.0], "signs alone are what local_updates hands on"
  start = [jnp.float32(x) for x in config["init"]]
  grads = [jnp.float32(g) for g in config["grads"]]
  return config["period"], lambda: optimizers.adam(rate, 0.0, 0.0), start, grads


def _columns(id):
  for event in recorded.RECORDINGS[id]["events"]:
    assert event["op"] == "step", f"unknown op {event['op']!r}"
    yield event["expect"]


def _alone(tx, params, grads):
  """The state of the only replica, and a step of it on these gradients."""
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)

  def step(state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.jit(
    jax.vmap(
      step,
      in_axes=(axes, None),
      out_axes=(0, axes),
      axis_name="i",
      axis_size=1,
    )
  )
  return state, mapped


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("id", _IDS)
def test_local_and_shared_parameters_are_as_recorded(id):
  period, inner, params, grads = _config(id)
  tx = optax_dist.local_updates(
    inner(), inner(), "i", communication_period=period, num_replicas=1
  )
  state, step = _alone(tx, params, grads)
  for *local_and_shared, _, rounds in _columns(id):
    params, state = step(state, params)
    params = [x[0] for x in params]  # There is one replica.
    got = [*params, *optax_dist.center_params(state)]
    np.testing.assert_allclose(got, local_and_shared, atol=1e-6)
    assert state.global_step == rounds


@pytest.mark.parametrize("id", _IDS)
def test_accumulated_gradient_and_its_step_are_as_recorded(id):
  period, inner, params, grads = _config(id)
  tx = optax_dist.sync_replicas(
    inner(), "i", replicas_to_aggregate=period, total_num_replicas=1
  )
  state, step = _alone(tx, params, grads)
  for _, _, *shared, accumulated, rounds in _columns(id):
    params, state = step(state, params)
    params = [x[0] for x in params]  # There is one replica.
    np.testing.assert_allclose(params, shared, atol=1e-6)
    own = state.replica.value
    held = np.where(own.num_accumulated > 0, own.gradient_sum[0], 0.0)
    np.testing.assert_allclose(held, [accumulated], atol=1e-6)
    assert state.global_step == rounds
