"""Tests of scalars that are computed by a single kernel."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal import axes
from optax_dist._internal.leaves.scalars import in_one_kernel

N = 2


def _count(common, own, flag):
  counted = own + flag.astype(jnp.int32)
  return {
    "common": (common + 1, common > 3),
    "own": (counted, jnp.where(flag, 0, own), ~flag, counted.astype(float)),
  }


@maps.every_map
def test_numbers_and_types_are_those_of_the_function(map_name):
  if map_name == "plain_jit":
    pytest.skip("There are no replicas to call it for.")

  def fun(own, flag):
    common = jnp.asarray(5, jnp.int32)
    got = in_one_kernel(_count, common, own, flag)
    want = _count(common, own, flag)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
      assert (a.dtype, axes.varying_axes(a)) == (b.dtype, axes.varying_axes(b))
    return got, want

  args = np.array([3, -(2**31)], np.int32), np.array([True, False])
  got, want = maps.run(map_name, fun, *args, size=N)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_there_is_a_single_kernel():
  fun = lambda *args: in_one_kernel(_count, *args)
  args = (np.zeros(N, np.int32),) * 2 + (np.zeros(N, bool),)
  run = jax.jit(maps.mapped("shard_map", fun, args, N))
  text = run.lower(*args).compile().as_text()
  entry = text[text.index("ENTRY") :]
  kernels = [" call(" in x or " fusion(" in x for x in entry.splitlines()]
  # Another one asks whether there is a round at all.
  assert sum(kernels) <= 2
