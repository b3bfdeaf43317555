"""Tests of rounds of other lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist.transforms.presets import local_sgd


def _tx(period):
  return local_sgd(
    optax.sgd(0.1), "i", communication_period=period, num_replicas=1
  )


def _step(tx, state):
  return jax.vmap(
    lambda s: tx.update(jnp.float32(1.0), s, jnp.float32(0.0))[1],
    in_axes=None,
    out_axes=None,
    axis_name="i",
    axis_size=1,
  )(state)


def test_a_schedule_makes_rounds_longer_in_one_program():
  """As in post-local SGD: of one step at first, long ones later."""
  tx = _tx(lambda step: jnp.where(step < 3, 1, 4))

  def step(state, _):
    state = _step(tx, state)
    return state, state.global_step

  _, rounds = jax.lax.scan(step, tx.init(jnp.zeros(())), length=13)
  ends = np.flatnonzero(np.diff(np.asarray(rounds), prepend=0)) + 1
  assert ends.tolist() == [1, 2, 3, 7, 11]


def test_transform_with_another_period_continues_from_the_state():
  """Its period counts from the next round on."""
  tx, rounds = _tx(3), []
  state = tx.init(jnp.zeros(()))
  for i in range(10):
    if i == 5:
      tx = _tx(2)
    state = _step(tx, state)
    rounds.append(int(state.global_step))
  assert rounds == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4]


def test_period_of_1_ends_an_open_round():
  state, rounds = _tx(3).init(jnp.zeros(())), []
  for period in (3, 1, 1, 3):
    state = _step(_tx(period), state)
    rounds.append(int(state.global_step))
  assert rounds == [0, 1, 2, 3]
