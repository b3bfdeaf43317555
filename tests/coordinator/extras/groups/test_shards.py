"""A process's own part of sharded arrays; here the process has all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist.coordinator.extras.groups import shards


@pytest.fixture
def mesh():
  return jax.make_mesh((2, 4), ("data", "fsdp"))


def put(mesh, value, *spec):
  return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def test_distinct_shards_are_listed_once_in_order(mesh):
  arrays = [
    put(mesh, jnp.arange(16.0).reshape(8, 2), "fsdp"),
    put(mesh, jnp.arange(6.0)),
    put(mesh, jnp.arange(8.0), ("data", "fsdp")),
    put(mesh, jnp.float32(3.0)),
  ]
  result = shards.LocalShards(arrays)
  shapes = [t.shape for t in result.templates]
  assert shapes == [(2, 2)] * 4 + [(6,)] + [(1,)] * 8 + [()]
  parts = [np.asarray(part) for part in result.split(arrays)]
  np.testing.assert_array_equal(np.concatenate(parts[:4]), arrays[0])
  np.testing.assert_array_equal(np.concatenate(parts[5:13]), arrays[2])
  joined = result.join([part + 1 for part in parts])
  for array, other in zip(arrays, joined, strict=True):
    np.testing.assert_array_equal(array + 1, other)
    assert other.sharding == array.sharding


def test_random_keys_survive_the_round_trip(mesh):
  key = put(mesh, jax.random.key(7))
  result = shards.LocalShards([key])
  (joined,) = result.join([np.asarray(x) for x in result.split([key])])
  assert joined.dtype == key.dtype
  np.testing.assert_array_equal(
    jax.random.key_data(joined), jax.random.key_data(key)
  )


def test_shards_may_have_another_dtype_than_the_parameters(mesh):
  result = shards.LocalShards([put(mesh, jnp.ones(8), "fsdp")])
  (joined,) = result.join([np.full(2, i, np.uint16) for i in range(4)])
  assert joined.dtype == jnp.uint16
  np.testing.assert_array_equal(joined, [0, 0, 1, 1, 2, 2, 3, 3])


def test_differences_between_replicas_are_named(mesh):
  params = {"w": put(mesh, jnp.ones((8, 4)), "fsdp", None)}
  ours = shards.agreement(params)
  assert ours == shards.agreement({"w": put(mesh, jnp.ones((8, 4)), "fsdp")})
  other = shards.agreement({"w": put(mesh, jnp.ones((8, 4)), None, "fsdp")})
  (differs,) = [a[0] for a, b in zip(ours, other, strict=True) if a != b]
  assert differs == "sharding of params['w']"
  turned = jax.make_mesh((4, 2), ("data", "fsdp"))
  other = shards.agreement({"w": put(turned, jnp.ones((8, 4)), "fsdp")})
  assert "'data': 2" in ours[0][1]
  assert "'data': 4" in other[0][1]


def test_parameters_without_a_mesh_or_on_two_are_refused(mesh):
  with pytest.raises(ValueError, match=r"params\['w'\] must have a NamedShard"):
    shards.mesh_of({"w": jnp.ones(3)})
  other = jax.make_mesh((8,), ("fsdp",))
  with pytest.raises(
    ValueError, match=r"params\['b'\] must be on the same mesh"
  ):
    shards.mesh_of({"a": put(mesh, jnp.ones(8)), "b": put(other, jnp.ones(8))})
