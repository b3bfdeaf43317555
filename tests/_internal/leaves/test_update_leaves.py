"""Tests of the names of updates, and of what they may be."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

import optax_dist
from optax_dist._internal.leaves import update_leaves


def _path(tree):
  ((path, leaf),), _ = jax.tree_util.tree_flatten_with_path(tree)
  return path, leaf


def test_leaf_is_named_by_its_expression():
  path, _ = _path({"layers": [None, ({"w": 1.0},)]})
  assert update_leaves.name_of(path) == "updates['layers'][1][0]['w']"
  assert update_leaves.name_of(()) == "updates"


@pytest.mark.parametrize("leaf", [1.5, 1j, np.float64(1.0)])
def test_numbers_can_be_averaged(leaf):
  update_leaves.check_dtype("a test", (), leaf)


@pytest.mark.parametrize(
  ("leaf", "dtype"),
  [
    (np.zeros(2, np.int8), "int8"),
    (np.zeros(2, bool), "bool"),
    (np.zeros(2, jax.dtypes.float0), "float0"),
    (3, "int32"),
  ],
)
def test_updates_of_other_dtypes_are_refused_by_name(leaf, dtype):
  path, leaf = _path({"w": leaf})
  with pytest.raises(
    TypeError, match=rf"^a test .* but updates\['w'\] is {dtype}"
  ):
    update_leaves.check_dtype("a test", path, leaf)


@maps.tracked_map
def test_a_summed_leaf_is_named_with_its_axis(map_name):
  def check(**leaves):
    update_leaves.check_gradients("a test", leaves, (maps.AXIS,), "")

  def step(own, shared):
    check(w=own)
    with pytest.raises(ValueError, match=r"updates\['w'\] does not vary") as e:
      check(own=own, w=shared)
    assert f"axis {maps.AXIS!r}" in str(e.value)
    assert "optax_dist.local_params" in str(e.value)
    return own

  x = np.ones(4, np.float32)
  maps.run(map_name, step, x, maps.Replicated(x), size=4)


def test_sparse_updates_and_none_are_like_their_parameters():
  slices = optax_dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
  params = {"a": jnp.ones((3, 2)), "b": jnp.ones(1)}
  update_leaves.check_like("x", {"a": slices, "b": None}, params)
  with pytest.raises(ValueError, match=r"updates\['b'\] .* got \(3, 2\)"):
    update_leaves.check_like("x", {"a": None, "b": slices}, params)
