"""Tests of the schedules of the rounds' lengths."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist.transforms.presets import local_sgd
from optax_dist.transforms.schedules import (
  SettablePeriod,
  adacomm_period,
  post_local_period,
)


def test_post_local_sgd():
  """Rounds of one step until the switch, then long ones, in one program."""
  tx = local_sgd(
    optax.sgd(0.1),
    "i",
    communication_period=post_local_period(4, switch_step=3),
    num_replicas=1,
  )

  def step(state, _):
    state = jax.vmap(
      lambda s: tx.update(jnp.float32(1.0), s, jnp.float32(0.0))[1],
      in_axes=None,
      out_axes=None,
      axis_name="i",
      axis_size=1,
    )(state)
    return state, state.global_step

  _, rounds = jax.lax.scan(step, tx.init(jnp.zeros(())), length=13)
  ends = np.flatnonzero(np.diff(np.asarray(rounds), prepend=0)) + 1
  assert ends.tolist() == [1, 2, 3, 7, 11]


def test_a_period_that_is_set():
  tx = local_sgd(
    optax.sgd(0.1),
    "i",
    communication_period=SettablePeriod(3),
    num_replicas=1,
  )
  state = tx.init(jnp.zeros(()))
  step = jax.jit(
    jax.vmap(
      lambda s: tx.update(jnp.float32(1.0), s, jnp.float32(0.0))[1],
      in_axes=None,
      out_axes=None,
      axis_size=1,
      axis_name="i",
    )
  )
  rounds = []
  for i in range(10):
    if i == 5:
      state = optax.tree.set(state, period=jnp.int32(2))
    state = step(state)
    rounds.append(int(state.global_step))
  assert rounds == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
  "arguments", [(0, 1), (4, 0), (2.0, 1), (4, True), (-1, 3)]
)
def test_post_local_period_checks_its_arguments(arguments):
  with pytest.raises(ValueError, match="must be a positive integer"):
    post_local_period(*arguments)


@hypothesis.given(
  initial=st.integers(1, 100),
  first=st.floats(0.1, 10),
  fraction=st.floats(0, 1.5),
  last=st.none() | st.integers(1, 100),
)
def test_adacomm(initial, first, fraction, last):
  period = adacomm_period(initial, first, first * fraction, last)
  asked = initial * math.sqrt(first * fraction / first)
  if last is None:
    assert max(1, asked) <= period < asked + 1 or period == 1
  else:
    # It falls in any case, but at one step.
    assert period < last or period == 1
    assert period in (max(1, math.ceil(asked)), max(1, last // 2))


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    ((0, 1.0, 1.0), "`initial_period` must be a positive integer"),
    ((4, 0.0, 1.0), "`initial_loss` must be positive"),
    ((4, math.inf, 1.0), "`initial_loss` must be positive"),
    ((4, 1.0, -1.0), "`loss` must be finite and not negative"),
    ((4, 1.0, math.nan), "`loss` must be finite and not negative"),
    ((4, 1.0, 1.0, 0), "`last_period` must be a positive integer"),
  ],
)
def test_adacomm_checks_its_arguments(arguments, what):
  with pytest.raises(ValueError, match=what):
    adacomm_period(*arguments)
