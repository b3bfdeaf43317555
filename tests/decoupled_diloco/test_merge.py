"""Tests of merging against NumPy, and of what the papers say of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from own_params import normal

from optax_dist import decoupled_diloco


def _unit(x):
  return x / np.linalg.norm(x)


def test_the_radial_rule_is_its_equation():
  rows = [{"a": normal(i, 4, 3), "b": normal(9 + i, 5)} for i in range(3)]
  weights = np.array([1.0, 2.0, 5.0])
  got = decoupled_diloco.merge(rows, weights)
  for key in "ab":
    vs = [row[key] for row in rows]
    norm = sum(w * np.linalg.norm(v) for w, v in zip(weights, vs, strict=True))
    along = sum(w * _unit(v) for w, v in zip(weights, vs, strict=True))
    expected = norm / weights.sum() * _unit(along)
    np.testing.assert_allclose(got[key], expected, rtol=1e-5, atol=1e-6)


def test_the_mean_is_the_weighted_mean():
  rows = [normal(i, 6) for i in range(3)]
  got = decoupled_diloco.merge(rows, [1, 2, 5], "mean")
  expected = np.average(rows, axis=0, weights=[1, 2, 5])
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learners", [2, 8, 16])
def test_orthogonal_ones_keep_their_length_where_a_mean_shrinks(learners):
  rows = list(np.eye(16, dtype=np.float32)[:learners])
  shares = [1.0] * learners
  radial = decoupled_diloco.merge(rows, shares)
  mean = decoupled_diloco.merge(rows, shares, "mean")
  assert np.linalg.norm(radial) == pytest.approx(1.0, rel=1e-5)
  assert np.linalg.norm(mean) == pytest.approx(learners**-0.5, rel=1e-5)


@pytest.mark.parametrize("rule", ["radial", "mean"])
def test_equal_ones_come_back(rule):
  x = normal(0, 7)
  got = decoupled_diloco.merge([x] * 3, [0.2, 0.5, 0.3], rule)
  np.testing.assert_allclose(got, x, rtol=1e-5)


def test_zeros_and_opposites_do_no_harm():
  zero, x = np.zeros(3, np.float32), np.float32([1, 2, 2])
  merge = decoupled_diloco.merge
  np.testing.assert_array_equal(merge([zero, zero], [1, 1]), zero)
  np.testing.assert_array_equal(merge([x, -x], [1, 1]), zero)
  np.testing.assert_allclose(merge([x, zero], [1, 1]), x / 2, rtol=1e-6)


def test_a_mix_keeps_dtypes():
  own, new = jnp.array([1.0, 3.0], jnp.bfloat16), jnp.array([5.0, 3.0])
  for alpha, expected in ((1.0, [1, 3]), (0.0, [5, 3]), (0.25, [4, 3])):
    got = decoupled_diloco.mix(own, new, alpha)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), expected)


def test_fragments_are_about_equal_and_none_is_empty():
  sizes = [900, 500, 400, 300, 200, 100, 0]
  params = {str(i): np.zeros(n) for i, n in enumerate(sizes)}
  found = decoupled_diloco.balanced_fragments(params, 3)
  load = [0, 0, 0]
  for key, fragment in found.items():
    load[fragment] += params[key].size
  assert load == [900, 800, 700]
  empty = decoupled_diloco.balanced_fragments([np.zeros(0)] * 3, 3)
  assert sorted(empty) == [0, 1, 2]


def test_bad_arguments_are_refused():
  merge, x = decoupled_diloco.merge, np.ones(2)
  with pytest.raises(ValueError, match="got 0 and 0 weights"):
    merge([], [])
  with pytest.raises(ValueError, match="got 2 and 1 weights"):
    merge([x, x], [1.0])
  with pytest.raises(ValueError, match="not all zero"):
    merge([x, x], [0.0, 0.0])
  with pytest.raises(ValueError, match=r"rule must be .* got 'median'"):
    merge([x], [1.0], "median")
  with pytest.raises(ValueError, match=r"alpha must be .* got 2"):
    decoupled_diloco.mix(x, x, 2)
  with pytest.raises(ValueError, match=r"from 1 to 2, .* got 3"):
    decoupled_diloco.balanced_fragments([x, x], 3)
