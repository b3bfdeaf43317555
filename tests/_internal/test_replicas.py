"""Tests of how many replicas there are, and of what each of them holds first."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optax_dist._internal.replicas import Replica, Replicas
from optax_dist.sparse import IndexedSlices

N = 4


def _of(number, argument="num_replicas"):
  return Replicas.of("it", maps.AXIS, number, (), argument)


def _in_map(map_name, fn, *args):
  return maps.run(map_name, fn, *args, size=N)


def test_several_axes_are_counted_together():
  count = lambda x: x + Replicas.of("it", ("a", "b"), None, ()).at_init()
  both = jax.vmap(jax.vmap(count, axis_name="b"), axis_name="a")
  np.testing.assert_array_equal(both(jnp.zeros((2, 3))), 6)


@maps.tracked_map
def test_inside_the_map_a_replica_makes_its_own_block(map_name):
  def body(x):
    x = _of(N).start(jnp.float32(1.0), N).value + 0 * x

    # The type of a carry must not change.
    def step(carry, _):
      return carry + jax.lax.axis_index(maps.AXIS), None

    first = _of(N).start(jnp.int32(0), N).value
    last, _ = jax.lax.scan(step, first, length=2)
    return x, last

  ones, last = _in_map(map_name, body, np.zeros(N, np.float32))
  np.testing.assert_array_equal(ones, np.ones((N, 1)))
  np.testing.assert_array_equal(last, 2 * np.arange(N)[:, None])


@pytest.mark.parametrize("shape", [(), (2, 3)])
@maps.every_map
def test_replicas_draw_different_random_numbers(map_name, shape):
  keys = jax.random.split(jax.random.key(0), shape)
  normal = jnp.vectorize(jax.random.normal)

  def draw(_):
    own = _of(N).start(keys, N).value
    return normal(own[0])

  inside = _in_map(map_name, draw, np.zeros(N))
  outside = _of(N).start(keys, N).value
  np.testing.assert_allclose(inside, normal(outside))
  assert len(set(inside.ravel().tolist())) == inside.size


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_under_a_mesh_each_block_is_made_on_the_device_of_its_replica(
  explicit, jitted
):
  make = lambda x: _of(N).start(x, N)
  with jax.set_mesh(maps.mesh(N, explicit)):
    block = (jax.jit(make) if jitted else make)(jnp.zeros(3)).value
  assert block.shape == (N, 3)
  shapes = {shard.data.shape for shard in block.addressable_shards}
  assert shapes == {(1, 3)}


@pytest.mark.parametrize("explicit", [False, True])
def test_placed_parameters_tell_where_each_block_belongs(explicit):
  """The blocks of all replicas may not fit onto one device."""
  mesh = maps.mesh(N, explicit)
  placed = jax.device_put(jnp.ones((3, 4)), jax.NamedSharding(mesh, P()))
  own = {"count": jnp.zeros([], jnp.int32), "w": placed}
  blocks = _of(N).start(own, N).value
  for x in jax.tree.leaves(blocks):
    spec = jax.NamedSharding(mesh, P(maps.AXIS))
    assert x.sharding.is_equivalent_to(spec, x.ndim)
  np.testing.assert_array_equal(blocks["w"], np.ones((N, 3, 4)))


_SPARSE = IndexedSlices(np.ones((2, 1), np.float32), np.array([0, 2]), (3, 1))


@pytest.mark.parametrize(
  ("tree", "finite"),
  [
    ({}, True),
    ({"x": np.float32([1, -3e38]), "y": np.float32([3e38])}, True),
    ({"x": np.ones(2, np.float32), "y": np.float16([1, np.nan])}, False),
    ({"x": np.complex64([1, complex(0, np.inf)])}, False),
    ({"x": _SPARSE, "count": np.int32([7])}, True),
    ({"x": IndexedSlices(np.inf * _SPARSE.values, [0, 2], (3, 1))}, False),
  ],
)
def test_all_finite_covers_every_leaf(tree, finite):
  replica = Replica(_of(N), N, None, False, frozenset())
  assert bool(replica.all_finite(tree)) == finite
