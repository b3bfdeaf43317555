"""Tests of the check for infinite and NaN elements."""

import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal.leaves import are_finite

N = 2


def _flags(map_name, *arrays):
  def fun(*xs):
    return are_finite.are_all([are_finite.number(x) for x in xs])

  stacked = [jnp.stack([jnp.ones_like(x), x]) for x in arrays]
  return maps.run(map_name, fun, *stacked, size=N).tolist()


@pytest.mark.parametrize(
  "dtype", ["float32", "bfloat16", "float16", "complex64"]
)
@pytest.mark.parametrize("map_name", ["vmap", "shard_map", "shard_map_vma"])
def test_one_bad_element_is_found(map_name, dtype):
  for bad in (np.inf, -np.inf, np.nan):
    x = jnp.zeros((40, 30), dtype).at[7, 3].set(bad)
    assert _flags(map_name, jnp.zeros(3, dtype), x) == [True, False]


@pytest.mark.parametrize("map_name", ["vmap", "shard_map"])
def test_large_and_tiny_elements_are_finite(map_name):
  largest = np.finfo(np.float32).max
  for value in (largest, -largest, 1e-44, 0.0):
    xs = [jnp.full((300, 50), value, jnp.float32)] * 3
    assert _flags(map_name, *xs) == [True, True]


@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma"])
@pytest.mark.parametrize(
  ("bad", "at"),
  [(np.inf, (0, 0, 0)), (-np.inf, (1, 7, 3)), (np.nan, (2, 149, 79))],
)
def test_one_bad_element_of_a_large_array_is_found(map_name, bad, at):
  x = jnp.full((3, 150, 80), 3e38, jnp.float32).at[at].set(bad)
  assert _flags(map_name, jnp.zeros((200, 100)), x) == [True, False]


def test_an_array_without_elements_is_finite():
  assert _flags("shard_map", jnp.zeros((0, 3))) == [True, True]
