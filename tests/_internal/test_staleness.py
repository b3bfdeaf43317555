"""Tests of what a late gradient counts for."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist._internal import staleness


def test_inverse_counts_the_fresh_and_the_next_in_full():
  late = jnp.arange(-1, 5)
  weights = staleness.weight_function("inverse")(late)
  np.testing.assert_allclose(weights, [1, 1, 1, 1 / 2, 1 / 3, 1 / 4])
  assert weights.dtype == jnp.float32


def test_a_weight_function_is_used_unchanged():
  function = lambda late: 0.5**late
  assert staleness.weight_function(function) is function
  assert staleness.weight_function(None) is None


@pytest.mark.parametrize("weight", ["linear", 1, ["inverse"]])
def test_anything_else_is_refused(weight):
  with pytest.raises(ValueError, match="`staleness_weight` must be None") as e:
    staleness.weight_function(weight)
  assert repr(weight) in str(e.value)
