"""Adasum against its recursive formula."""

import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist.transforms._adasum import adasum


def _by_hand(rows):
  if len(rows) == 1:
    return rows[0]
  half = (len(rows) + 1) // 2
  a, b = _by_hand(rows[:half]), _by_hand(rows[half:])
  dot = np.vdot(a, b)
  return (1 - dot / (2 * np.vdot(a, a))) * a + (
    1 - dot / (2 * np.vdot(b, b))
  ) * b


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 8])
def test_adasum_follows_the_recursive_formula(replicas):
  rows = np.random.default_rng(replicas).normal(size=(replicas, 4, 3))
  rows = rows.astype(np.float32)
  got = adasum(jnp.asarray(rows))
  np.testing.assert_allclose(got, _by_hand(rows), rtol=1e-5, atol=1e-6)


def test_orthogonal_gradients_are_added_and_equal_ones_averaged():
  np.testing.assert_allclose(adasum(jnp.eye(4)), np.ones(4))
  equal = jnp.ones((6, 5)) * 3
  np.testing.assert_allclose(adasum(equal), equal[0], rtol=1e-6)


def test_zero_gradients_do_not_divide_by_zero():
  rows = jnp.array([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
  np.testing.assert_array_equal(adasum(rows), [1.0, 2.0])


def test_half_precision_does_not_overflow():
  rows = jnp.full((2, 64), 200.0, jnp.float16)  # The square sum is above 65504.
  got = adasum(rows)
  assert got.dtype == jnp.float16
  np.testing.assert_allclose(got, rows[0])


def test_complex_gradients_count_by_their_real_inner_product():
  a, b = np.array([[1 + 2j, 3 - 1j], [2j, 1 + 1j]], np.complex64)
  dot = np.real(np.vdot(a, b))
  expected = (1 - dot / 30) * a + (1 - dot / 12) * b
  np.testing.assert_allclose(
    adasum(jnp.asarray(np.stack([a, b]))), expected, rtol=1e-5
  )


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e25, 1e30])
def test_tiny_and_huge_gradients_stay_finite(size):
  rows = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  got = adasum(jnp.asarray(rows * np.float32(size)))
  np.testing.assert_allclose(got / size, _by_hand(rows), rtol=1e-4, atol=1e-5)


def test_empty_gradients_are_accepted():
  assert adasum(jnp.zeros((2, 0, 3))).shape == (0, 3)


@maps.both_kinds
def test_tree_with_an_empty_leaf_is_accepted(map_name):
  tx = optax_dist.cross_shard(maps.AXIS, reduction="adasum")
  rows = {"none": jnp.zeros((2, 0, 3)), "some": jnp.eye(2)}
  total = maps.run(
    map_name, lambda x: tx.update(x, optax.EmptyState())[0], rows, size=2
  )
  assert total["none"].shape == (2, 0, 3)
  np.testing.assert_array_equal(total["some"], np.ones((2, 2)))
