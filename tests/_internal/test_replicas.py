"""Tests of how many replicas there are, and of what each of them holds first."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optax_dist import UnboundAxisError
from optax_dist._internal.replicas import Replicas

N = 4


def _of(number, argument="num_replicas"):
  return Replicas.of("it", maps.AXIS, number, (), argument)


def _in_map(map_name, fn, *args):
  return maps.run(map_name, fn, *args, size=N)


@maps.both_kinds
@pytest.mark.parametrize("ask", [Replicas.at_init, Replicas.in_update])
def test_inside_the_map_they_are_counted(map_name, ask):
  count = lambda x: x + ask(_of(None)) + ask(_of(N))
  np.testing.assert_array_equal(_in_map(map_name, count, np.zeros(N)), 2 * N)


@maps.both_kinds
@pytest.mark.parametrize("ask", [Replicas.at_init, Replicas.in_update])
def test_a_wrong_number_of_replicas_is_refused(map_name, ask):
  with pytest.raises(ValueError, match="it: `size` is 5, but there are 4"):
    _in_map(map_name, lambda x: x + ask(_of(5, "size")), np.zeros(N))


def test_outside_of_the_map_the_number_comes_from_the_mesh_or_the_caller():
  assert _of(7).at_init() == 7
  with jax.set_mesh(maps.mesh(N)):
    assert _of(None).at_init() == N
    assert _of(N).at_init() == N
    with pytest.raises(ValueError, match="there are 4 replicas along"):
      _of(5).at_init()
  with pytest.raises(ValueError, match=r"not known in `init`. Give `size`, or"):
    _of(None, "size").at_init()
  with pytest.raises(UnboundAxisError, match="it: "):
    _of(N).in_update()


def test_several_axes_are_counted_together():
  count = lambda x: x + Replicas.of("it", ("a", "b"), None, ()).at_init()
  both = jax.vmap(jax.vmap(count, axis_name="b"), axis_name="a")
  np.testing.assert_array_equal(both(jnp.zeros((2, 3))), 6)


def test_outside_of_the_map_all_replicas_start_alike():
  block = _of(3).start({"x": jnp.arange(2), "n": None}, 3).value
  np.testing.assert_array_equal(block["x"], [[0, 1]] * 3)
  assert block["n"] is None


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


@maps.tracked_map
def test_a_counter_that_may_differ_is_refused(map_name):
  def check(counter):
    _of(N).check_counter(counter)
    return jnp.float32(0.0)

  _in_map(map_name, check, maps.Replicated(np.int32(0)))
  with pytest.raises(ValueError, match=r"could disagree on when .*state_specs"):
    _in_map(map_name, check, np.zeros(N, np.int32))


def test_a_counter_with_a_replica_axis_is_refused():
  _of(N).check_counter(jnp.int32(0))
  with pytest.raises(ValueError, match=r"shape \(1,\), which must be \(\)"):
    _of(N).check_counter(jnp.zeros(1, jnp.int32))


@maps.every_map
def test_replicas_draw_different_random_numbers(map_name):
  def draw(_):
    own = _of(N).start(jax.random.key(0), N).value
    return jax.random.normal(own[0])

  inside = _in_map(map_name, draw, np.zeros(N))
  outside = _of(N).start(jax.random.key(0), N).value
  np.testing.assert_allclose(inside, jax.vmap(jax.random.normal)(outside))
  assert len(set(inside.tolist())) == N


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
