"""Digests of trees: equal if and only if all their bytes are."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist.coordinator import fingerprint

_TREE = {"a": np.arange(6, dtype=np.float32), "b": np.float32(2)}


def test_fingerprint_does_not_depend_on_placement():
  expected = fingerprint(_TREE)
  assert len(expected) == 16
  assert fingerprint(jax.tree.map(jnp.asarray, _TREE)) == expected
  sharded = optax_dist.states.place(
    {"w": np.arange(8.0)}, maps.mesh(4), P(maps.AXIS)
  )
  assert fingerprint(sharded) == fingerprint({"w": np.asarray(sharded["w"])})
  every_other = np.arange(12, dtype=np.float32)[::2]  # Not contiguous.
  assert fingerprint(every_other) == fingerprint(every_other.copy())


@pytest.mark.parametrize(
  "other",
  [
    {"a": _TREE["a"][::-1], "b": _TREE["b"]},
    {"a": _TREE["a"].reshape(2, 3), "b": _TREE["b"]},
    {"a": _TREE["a"].view(np.int32), "b": _TREE["b"]},
    {"a": np.nextafter(_TREE["a"], np.float32(9)), "b": _TREE["b"]},
    {"a": _TREE["b"], "b": _TREE["a"]},
    {"a": _TREE["a"]},
  ],
  ids=["order", "shape", "dtype", "last bits", "leaves", "fewer"],
)
def test_fingerprint_differs_if_any_part_differs(other):
  assert fingerprint(other) != fingerprint(_TREE)


def test_random_keys_have_different_fingerprints():
  zero, one = jax.random.key(0), jax.random.key(1)
  assert fingerprint(zero) != fingerprint(one)
  assert fingerprint(zero) == fingerprint(jax.random.key_data(zero))
