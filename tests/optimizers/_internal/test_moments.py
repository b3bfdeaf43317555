"""Tests of moving averages of sparse gradients."""

import jax.numpy as jnp

from optax_dist.optimizers._internal import moments
from optax_dist.sparse.indexed_slices import IndexedSlices


def test_all_rows_decay_and_repeated_ones_count_each():
  slices = IndexedSlices(jnp.ones((3, 1)), jnp.array([1, 1, 2]), (2, 1))
  old = jnp.array([[4.0], [8.0]])
  average = moments.average(old, 0.5, slices, 2 * slices.values)
  assert average.tolist() == [[2.0], [6.0]]
