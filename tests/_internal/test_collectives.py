"""Tests of the sums over axes: how many messages, which groups, what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist._internal import collectives

N = 4


def _update(tx, updates):
  return tx.update(updates, tx.init(updates))[0]


def _all_reduces(tx, tree, map_name="shard_map"):
  run = maps.mapped(map_name, functools.partial(_update, tx), (tree,), N)
  return str(jax.make_jaxpr(run)(tree)).count("psum")


@pytest.mark.parametrize("map_name", ["pmap", "shard_map", "shard_map_vma"])
def test_small_leaves_of_one_dtype_travel_together_between_cpus(
  map_name, monkeypatch
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  small = {i: np.ones((N, 5 + i), np.float32) for i in range(6)}
  half = {i: np.ones((N, 5), np.float16) for i in range(3)}
  tx = optax_dist.cross_shard(maps.AXIS)
  assert _all_reduces(tx, {"single": small, "half": half}, map_name) == 2


def test_large_leaves_travel_by_themselves_between_cpus(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  tree = {
    "small": [np.ones((N, 5), np.float32)] * 3,
    "large": [np.ones((N, 1 << 19), np.float32)] * 2,
  }
  tx = optax_dist.cross_shard(maps.AXIS)
  assert _all_reduces(tx, tree) == 1 + 2


def test_leaves_are_not_joined_if_the_compiler_may_have_sharded_them(
  monkeypatch,
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  tx = optax_dist.cross_shard("data")
  tree = {i: np.random.default_rng(i).normal(size=(4, 6)) for i in range(3)}
  tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
  run = jax.shard_map(
    functools.partial(_update, tx),
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P("data"),
    axis_names={"data"},
  )
  assert str(jax.make_jaxpr(run)(tree)).count("psum") == 3
  means = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), tree)
  chex.assert_trees_all_close(jax.jit(run)(tree), means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [None, [[1, 0]]])
def test_a_vmap_axis_inside_check_vma_is_refused(groups):
  """JAX 0.10 has no collectives there; a bare AssertionError is no help."""
  tx = optax_dist.cross_shard("model", axis_index_groups=groups)
  run = jax.shard_map(
    jax.vmap(
      functools.partial(_update, tx), axis_name="model", in_axes=1, out_axes=1
    ),
    mesh=maps.mesh(4),
    in_specs=P("data"),
    out_specs=P("data"),
  )
  with pytest.raises(NotImplementedError, match="check_vma=False"):
    run(jnp.ones((4, 2, 5)))


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    (([0, 1], [2, 3]), "must be a list of lists of integers"),
    ([(0, 1), (2, 3)], "must be a list of lists of integers"),
    ([0, 0, 1, 1], "must be a list of lists of integers"),
    (np.array([[0, 1], [2, 3]]), "must be a list of lists of integers"),
    ([[0.0, 1.0]], "must be a list of lists of integers"),
    ([[False, True]], "must be a list of lists of integers"),
    ([[0], [1, 2, 3]], "must be equal in size"),
    ([[0, 1], [2, 2]], r"permutation of the axis's indices, of range\(4\)"),
    ([[0, 1], [1, 0]], r"permutation of the axis's indices, of range\(4\)"),
    ([[0, 4], [2, 3]], r"permutation of the axis's indices, of range\(4\)"),
    ([[-1, 0]], r"permutation of the axis's indices, of range\(2\)"),
    ([[]], r"permutation of the axis's indices, of range\(1\)"),
  ],
)
def test_invalid_groups_are_refused_with_the_reason(groups, message):
  with pytest.raises(ValueError, match=message) as info:
    collectives.check_groups(groups)
  assert repr(groups) in str(info.value)


@pytest.mark.parametrize(
  "groups", [None, [], [[0]], [[1, 0]], [[0, 2], [3, 1]]]
)
def test_valid_groups_are_accepted(groups):
  collectives.check_groups(groups)


def test_leaf_without_an_axis_to_sum_over_is_unchanged():
  leaf = jnp.ones(3)
  assert collectives.sum_leaves([leaf], [()])[0] is leaf


@pytest.mark.parametrize("check_vma", [False, True])
def test_groups_of_explicitly_sharded_arrays_are_summed(check_vma):
  mesh = jax.make_mesh(
    (2, 2), (maps.AXIS, "model"), axis_types=(AxisType.Explicit,) * 2
  )
  x = np.arange(16, dtype=np.float32).reshape(4, 4)
  run = jax.jit(
    jax.shard_map(
      lambda x: collectives.sum_leaves([x], [(maps.AXIS,)], [[0, 1]])[0],
      mesh=mesh,
      in_specs=P(maps.AXIS),
      out_specs=P(maps.AXIS),
      axis_names={maps.AXIS},
      check_vma=check_vma,
    )
  )
  sums = run(optax_dist.states.place(x, mesh, P(maps.AXIS, "model")))
  assert sums.sharding.spec == P(maps.AXIS, "model")
  np.testing.assert_array_equal(sums, np.tile(x[:2] + x[2:], (2, 1)))


@pytest.mark.parametrize("spec", [P(), P("model")], ids=str)
def test_arrays_on_an_explicit_mesh_are_summed_over_an_axis_of_vmap(spec):
  mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
  rows = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
  placed = jax.device_put(rows, jax.NamedSharding(mesh, P(None, *spec)))
  tx = optax_dist.cross_shard(maps.AXIS)
  mean = jax.jit(jax.vmap(functools.partial(_update, tx), axis_name=maps.AXIS))
  got = mean(placed)
  np.testing.assert_allclose(got, [rows.mean(0)] * N, rtol=1e-6)
  assert jax.typeof(got).sharding.spec == P(None, *(spec or [None]))


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]])
@pytest.mark.parametrize("map_name", ["vmap", "pmap", "shard_map_vma"])
def test_an_empty_leaf_is_not_sent(map_name, groups):
  tree = {
    "empty": np.ones((N, 2, 0), np.float32),
    "full": np.ones((N, 2), np.float32),
  }
  tx = optax_dist.cross_shard(
    maps.AXIS, reduction="sum", axis_index_groups=groups
  )
  got = maps.run(map_name, functools.partial(_update, tx), tree, size=N)
  assert got["empty"].shape == (N, 2, 0)
  np.testing.assert_array_equal(
    got["full"], np.full((N, 2), N if groups is None else 2)
  )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]])
@maps.both_kinds
def test_rows_without_elements_are_gathered(map_name, groups, shape):
  gather = lambda x: collectives.gather_rows(x, (maps.AXIS,), groups)
  rows = maps.run(map_name, gather, np.zeros((N, *shape), np.float32), size=N)
  assert rows.shape == (N, (2 if groups else N) * shape[0], shape[1])
