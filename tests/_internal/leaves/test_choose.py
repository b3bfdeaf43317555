"""Tests of the choice between two trees."""

import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves.choose import choose

N = 4


@maps.every_map
def test_each_replica_gets_what_its_predicate_says(map_name):
  def fn(x, y, flag):
    return choose(flag, {"a": x, "b": [y]}, {"a": y, "b": [x]})

  x = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
  flag = np.arange(N) % 2 == 0
  got = maps.run(map_name, fn, x, -x, flag, size=N)
  want = np.where(flag[:, None], x, -x)
  np.testing.assert_array_equal(got["a"], want)
  np.testing.assert_array_equal(got["b"][0], -want)


@pytest.mark.parametrize("flag", [True, False])
def test_scalars_are_broadcast(flag):
  got = choose(jnp.asarray(flag), jnp.ones(3), jnp.zeros(()))
  assert got.dtype == jnp.float32
  assert got.shape == (3,)
  np.testing.assert_array_equal(got, [float(flag)] * 3)
