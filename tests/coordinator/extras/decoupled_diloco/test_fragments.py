"""Fragments: how parameters are dealt out to them, and how one is mixed in."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator.extras.decoupled_diloco import fragments


def test_a_mix_keeps_dtypes():
  own, new = jnp.array([1.0, 3.0], jnp.bfloat16), jnp.array([5.0, 3.0])
  for alpha, expected in ((1.0, [1, 3]), (0.0, [5, 3]), (0.25, [4, 3])):
    got = fragments.mix(own, new, alpha)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), expected)


def test_fragments_are_about_equal_and_none_is_empty():
  sizes = [900, 500, 400, 300, 200, 100, 0]
  params = {str(i): np.zeros(n) for i, n in enumerate(sizes)}
  result = fragments.balanced_fragments(params, 3)
  assert [sum(sizes[i] for i in own) for own in result] == [900, 800, 700]
  empty = fragments.balanced_fragments([np.zeros(0)] * 3, 3)
  assert sorted(empty) == [[0], [1], [2]]


def test_more_fragments_than_arrays_are_refused():
  x = np.ones(2)
  with pytest.raises(ValueError, match=r"from 1 to 2, .* got 3"):
    fragments.balanced_fragments([x, x], 3)
