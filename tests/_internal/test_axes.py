"""Tests of what a named axis is in each map."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optax_dist._internal import axes

N = 4
ONES = np.ones(N, np.float32)


@maps.every_map
def test_tracking_of_a_map_is_detected(map_name):
  seen = {}

  def step(x):
    seen["tracked"] = axes.is_tracked(maps.AXIS)
    seen["on_mesh"] = maps.AXIS in axes.mesh_axes()
    seen["sizes"] = axes.check_bound([maps.AXIS], "a test")
    seen["platform"] = axes.platform()
    return x

  maps.run(map_name, step, ONES, size=N)
  assert seen == {
    "tracked": map_name in maps.TRACKED,
    "on_mesh": "vmap" not in map_name,
    "sizes": {maps.AXIS: N},
    "platform": "cpu",
  }


@maps.every_map
@pytest.mark.parametrize("which", [False, True])
def test_branches_may_vary_differently(map_name, which):
  """Trap 4: jax.lax.cond refuses zeros beside a gradient."""

  def step(own, shared):
    branches = (
      lambda: {"a": own, "b": shared},
      lambda: {"a": jnp.zeros_like(shared), "b": own},
    )
    if axes.is_tracked(maps.AXIS):
      with pytest.raises(TypeError, match="must have equal output types"):
        jax.lax.cond(which, *branches)
    return axes.when(which, *branches)

  own = np.arange(N, dtype=np.float32)
  got = maps.run(map_name, step, own, maps.Replicated(np.float32(7)), size=N)
  expected = (own, 7 * ONES) if which else (0 * ONES, own)
  np.testing.assert_array_equal((got["a"], got["b"]), expected)


@pytest.mark.parametrize("yes", [True, jnp.asarray(True), jnp.asarray(False)])
def test_when_keeps_the_dtypes_of_its_inputs(yes):
  """Always, without a branch, if the predicate is no array."""
  new = lambda: {"a": jnp.asarray(2.5), "key": jax.random.key(1)}
  old = lambda: {"a": jnp.asarray(1, jnp.bfloat16), "key": jax.random.key(0)}
  got = axes.when(yes, new, old)
  want = new() if yes else old()
  assert got["a"] == want["a"]
  assert got["a"].dtype == (jnp.float32 if yes is True else jnp.bfloat16)
  assert got["key"] == want["key"]


@maps.every_map
@pytest.mark.parametrize("enough", [2, N + 1])
def test_collective_is_allowed_under_a_reduced_predicate(map_name, enough):
  """Trap 2: a predicate of one replica's own would let some wait forever."""

  def step(here, x):
    count = jax.lax.psum(here.astype(jnp.float32), maps.AXIS)
    return axes.when(
      count >= enough,
      lambda: jax.lax.psum(x, maps.AXIS),
      lambda: jnp.zeros_like(x),
    )

  here = np.array([True, False, True, False])
  x = np.arange(N, dtype=np.float32)
  got = maps.run(map_name, step, here, x, size=N)
  np.testing.assert_array_equal(got, x.sum() if enough == 2 else 0)


@maps.tracked_map
def test_branches_may_vary_over_several_axes(map_name):
  kind = AxisType.Explicit if "explicit" in map_name else AxisType.Auto
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)

  def step(x, y):
    got = axes.when(x.sum() < 0, lambda: x, lambda: y)
    assert axes.varying_axes(got) == {"a", "b"}
    return got

  run = jax.shard_map(
    step, mesh=mesh, in_specs=(P("a"), P("b")), out_specs=P(("a", "b"))
  )
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  x, y = np.float32([-1, 1]), np.float32([5, 6])
  got = jax.jit(run)(put(x, P("a")), put(y, P("b")))
  np.testing.assert_array_equal(got, [-1, -1, 5, 6])


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
def test_a_mesh_may_be_partly_manual(manual):
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  seen = []

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=manual
  )
  def step(x):
    seen.append(axes.mesh_axes())
    return x

  jax.jit(step)(jnp.ones(2))
  assert seen[0] == manual
