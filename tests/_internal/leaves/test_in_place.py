"""Tests of changing arrays from time to time."""

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves.in_place import change_if

N = 4


@maps.every_map
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "batched"])
def test_changes_or_does_not(map_name, shared):
  """With a collective in it, whether or not the predicate is a replica's own."""
  x = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
  half = np.ones((N, 2), np.float16)

  def step(yes, x, half):
    def fun(carry):
      x, total, half = carry
      mean = jax.lax.pmean(x, maps.AXIS)
      # Less precise than the carry; and a result that varies less than it.
      return mean, total + jax.lax.psum(x, maps.AXIS), half.astype(jnp.float32)

    carry = x, jnp.zeros_like(x), half
    return change_if(yes > 0, fun, carry, [maps.AXIS])

  for yes in (0, 1):
    predicate = np.int32(yes)
    predicate = (
      maps.Replicated(predicate) if shared else np.stack([predicate] * N)
    )
    got = maps.run(map_name, step, predicate, x, half, size=N)
    same = lambda v: np.stack([v] * N)
    expected = (
      (same(x.mean(0)), same(x.sum(0)), half)
      if yes
      else (x, np.zeros_like(x), half)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-6)
    chex.assert_trees_all_equal_dtypes(got, expected)


def test_the_function_is_not_run_where_nothing_changes():
  ran = []

  def fun(x):
    jax.debug.callback(lambda: ran.append(None))
    return x + 1

  step = jax.jit(
    jax.vmap(lambda yes, x: change_if(yes, fun, x, ["i"]), axis_name="i")
  )
  for i in range(6):
    jax.block_until_ready(step(jnp.full(2, i == 4), jnp.zeros(2)))
  jax.effects_barrier()
  assert len(ran) == 1


def test_the_function_is_traced_once_where_types_tell_nothing():
  traced = []

  def step(x):
    def fun(x):
      traced.append(None)
      return 2 * x

    return change_if(jnp.asarray(True), fun, x, [maps.AXIS])

  x = np.ones((N, 2), np.float32)
  got = maps.run("shard_map", step, x, size=N)
  np.testing.assert_array_equal(got, 2 * x)
  assert len(traced) == 1
