"""Tests of a transform's view of its replicas and of their parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optax_dist._internal import replica_params
from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica, Replicas, dense_values
from optax_dist.sparse.indexed_slices import IndexedSlices

N = 4
_OF = Replicas.of("it", maps.AXIS, N, ())
some_maps = pytest.mark.parametrize(
  "map_name", ["vmap", "shard_map", "shard_map_vma"]
)


def _replica(leading=False):
  return Replica(_OF, N, None, leading, frozenset())


def _normal(seed, *shape):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(N, *shape)).astype(np.float32)


def test_arguments():
  of = Replicas.of("it", ["a", "b"], np.int64(6), "c", "size")
  assert (of.names, of.number, of.model_axes) == (("a", "b"), 6, ("c",))
  with pytest.raises(ValueError, match=r"it: .* along \['b'\], .*`model_axes`"):
    Replicas.of("it", ("a", "b"), 6, ("b", "c"))
  with pytest.raises(ValueError, match="`size` must be a positive integer"):
    Replicas.of("it", "a", 0, (), "size")


@maps.every_map
def test_the_common_parameters_are_those_of_the_first_replica(map_name):
  """Whatever the others hold, be it no number."""
  params = {
    "x": _normal(0, 3),
    "half": np.arange(N, dtype=np.float16),
    "count": np.arange(5, 5 + N, dtype=np.int32),
  }
  params["x"][1:] = np.nan
  common = lambda params: replica_params.common(params, _OF.names)
  got = maps.run(map_name, common, params, size=N)
  assert got["half"].dtype == np.float32  # As wide as averages are.
  for name, x in params.items():
    np.testing.assert_array_equal(got[name], np.stack([x[0]] * N))


def test_the_first_replica_is_the_first_along_all_axes():
  common = lambda x: replica_params.common(x, ("a", "b"))
  both = jax.vmap(jax.vmap(common, axis_name="b"), axis_name="a")
  x = jnp.arange(7.0, 13.0).reshape(2, 3)
  np.testing.assert_array_equal(both(x), np.full((2, 3), 7.0))


def test_outside_of_the_map_the_common_parameters_are_a_copy():
  """One that can be donated along with the parameters."""
  params = {"x": jnp.arange(3.0), "python": 2.0}
  got = replica_params.common(params, _OF.names)
  np.testing.assert_array_equal(got["x"], params["x"])
  pointers = [tree["x"].unsafe_buffer_pointer() for tree in (got, params)]
  assert pointers[0] != pointers[1]
  assert not got["python"].weak_type
  assert not replica_params.strong(params)["python"].weak_type


@pytest.mark.parametrize("undecided", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_all_shards_of_a_replica_agree(check_vma, undecided):
  """And no others; where a transform around this one decides, they don't."""
  of = Replicas.of("it", "data", 2, () if check_vma else "model")
  by_others = frozenset({"model"} if undecided else ())
  me = Replica(of, 2, None, False, by_others)
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  agree = jax.shard_map(
    lambda flag: me.agree(flag[0, 0])[None, None],
    mesh=mesh,
    in_specs=P("data", "model"),
    out_specs=P("data", "model"),
    check_vma=check_vma,
  )
  flags = np.array([[True, True], [True, False]])
  want = flags if undecided else [[True, True], [False, False]]
  np.testing.assert_array_equal(jax.jit(agree)(flags), want)


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
def test_whether_all_is_finite(tree, finite):
  assert bool(_replica().all_finite(tree)) == finite


@some_maps
@pytest.mark.parametrize("reject", [True, False])
def test_a_replica_that_is_not_finite_counts_as_at_the_center(map_name, reject):
  gaps = [_normal(0, 3), np.ones((N, 2), np.float16)]
  gaps[0][1, 0], gaps[1][2, 1] = np.nan, np.inf
  step = lambda gaps: tuple(_replica().finite_or_zero(gaps, reject))
  got, finite = maps.run(map_name, step, gaps, size=N)
  away = [1, 2] if reject else []
  assert finite.tolist() == [i not in away for i in range(N)]
  for x, given in zip(got, gaps, strict=True):
    assert x.dtype == given.dtype
    for i in range(N):
      np.testing.assert_array_equal(x[i], 0 * x[0] if i in away else given[i])


class _Own(NamedTuple):
  local_step: Any


class _State(NamedTuple):
  iterations: Any
  center: Any
  replica: Any


@some_maps
def test_only_parameters_with_a_gradient_take_part(map_name):
  params = {"frozen": _normal(0, 2), "table": _normal(1, 3, 1), "w": _normal(2)}
  center = {name: np.zeros(x.shape[1:]) + 1 for name, x in params.items()}
  center = jax.tree.map(np.float32, center)

  def step(params, values):
    indices = jnp.array([0, 2])
    grads = {
      "frozen": None,
      "table": IndexedSlices.unchecked(values, indices, (3, 1)),
      "w": params["w"],
    }
    state = _State(jnp.int32(0), center, _OF.start(_Own(jnp.int32(7)), N))
    me, leaves, xs, gs, cs = replica_params.enter(_OF, state, params, grads)
    (values,) = dense_values(gs[:1])
    table = replica_params.dense(gs)[0]
    moved = leaves.put(params, [x - c for x, c in zip(xs, cs, strict=True)])
    return moved, values, table, me.own.local_step, me.leave(me.own)

  values = _normal(3, 2, 1)
  moved, got, table, count, block = maps.run(
    map_name, step, params, values, size=N
  )
  np.testing.assert_array_equal(moved["frozen"], params["frozen"])
  for name in ("table", "w"):
    np.testing.assert_array_equal(moved[name], params[name] - 1)
  np.testing.assert_array_equal(got, values)
  np.testing.assert_array_equal(table[:, [0, 2]], values)
  assert count.tolist() == [7] * N
  assert block.value.local_step.shape == (N, 1)


def test_leaves_are_taken_and_put_by_their_place():
  tree = {"a": 1, "b": None, "c": [2, {"d": 3}]}
  treedef = jax.tree.structure(tree, is_leaf=lambda x: x is None)
  leaves = Leaves(treedef, [0, 2, 3])
  assert leaves.of(tree) == [1, 2, 3]
  # What is in the place of a leaf may be a tree.
  assert leaves.of({"a": (4, 5), "b": 6, "c": [7, {"d": None}]}) == [
    (4, 5),
    7,
    None,
  ]
  some = leaves.among([3, 1, 0])
  assert some.of(tree) == [1, 3]
  assert some.put(tree, [10, 30]) == {"a": 10, "b": None, "c": [2, {"d": 30}]}
  with pytest.raises(ValueError, match=r"shorter|longer"):
    some.put(tree, [10])


def test_a_step_that_moves_nothing_has_no_part_that_can_not_move():
  center = {
    "x": jnp.ones(2, jnp.bfloat16),
    "c": jnp.ones(1, jnp.complex64),
    "count": jnp.int32(3),
    "key": jax.random.key(0),
  }
  step = replica_params.unmoved(center)
  assert step["count"] is None
  assert step["key"] is None
  for name in ("x", "c"):
    assert step[name].dtype == center[name].dtype
    assert not step[name].any()
