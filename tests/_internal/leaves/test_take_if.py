"""Tests of taking what was sent from time to time, where all is small."""

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves.take_if import take_if

N = 4


@maps.every_map
@pytest.mark.parametrize("yes", [0, 1])
def test_takes_or_does_not(map_name, yes):
  """With a collective in what is sent; what is not finite stays out of it."""
  x = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
  half = np.ones((N, 2), np.float16)

  def step(yes, x, half):
    def take(sent):
      # By zero, where nothing was sent. Less precise, and varies less.
      return x / sent, sent, half.astype(jnp.float32) * 2

    old = x, jax.lax.psum(0 * x, maps.AXIS), half
    return take_if(yes > 0, lambda: jax.lax.psum(x, maps.AXIS), take, old)

  got = maps.run(
    map_name, step, maps.Replicated(np.int32(yes)), x, half, size=N
  )
  total = np.stack([x.sum(0)] * N)
  expected = (
    (x / total, total, 2 * half) if yes else (x, np.zeros_like(x), half)
  )
  chex.assert_trees_all_close(got, expected, rtol=1e-6)
  chex.assert_trees_all_equal_dtypes(got, expected)


def test_nothing_is_sent_where_nothing_is_taken():
  ran = []

  def send(x):
    jax.debug.callback(lambda: ran.append(None))
    return x + 1

  step = jax.jit(
    lambda yes, x: take_if(yes, lambda: send(x), lambda sent: sent, x)
  )
  for i in range(6):
    jax.block_until_ready(step(jnp.asarray(i == 4), jnp.zeros(2)))
  jax.effects_barrier()
  assert len(ran) == 1


def test_what_nobody_sends_for_is_taken_too():
  take = lambda yes: take_if(
    yes, lambda: (), lambda _: jnp.ones(2), jnp.zeros(2)
  )
  assert [take(jnp.asarray(yes)).tolist() for yes in (False, True)] == [
    [0, 0],
    [1, 1],
  ]
