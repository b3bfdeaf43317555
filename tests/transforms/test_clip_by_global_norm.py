"""Tests of clipping by the norm of all shards, against optax on the whole."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

DATA, MODEL = 2, 4
SPECS = {
  "w": P(None, "model"),
  "fsdp": P("data", "model"),
  "b": P("model"),
  "whole": P(),
  "none": None,
}


def _tree(dtype=np.float32):
  rng = np.random.default_rng(0)
  shapes = {"w": (3, 8), "fsdp": (4, 4), "b": (4,), "whole": (5,)}
  tree = {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}
  return {**tree, "none": None}


def _mesh(explicit=False):
  kind = AxisType.Explicit if explicit else AxisType.Auto
  return jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=(kind,) * 2)


def _update(tx, tree):
  return tx.update(tree, tx.init(tree))[0]


def _sharded(tx, tree, check_vma, explicit=False):
  run = jax.shard_map(
    lambda tree: _update(tx, tree),
    mesh=_mesh(explicit),
    in_specs=(SPECS,),
    out_specs=SPECS,
    check_vma=check_vma,
  )
  return jax.jit(run)(optax_dist.states.place(tree, _mesh(explicit), SPECS))


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
  ("check_vma", "specs"), [(True, None), (True, SPECS), (False, SPECS)]
)
def test_shards_are_clipped_as_the_whole_tree_is(
  check_vma, specs, explicit, max_norm
):
  tx = optax_dist.clip_by_global_norm(
    max_norm, ("data", "model"), param_specs=specs
  )
  tree = _tree()
  got = _sharded(tx, tree, check_vma, explicit)
  expected = _update(optax.clip_by_global_norm(max_norm), tree)
  for name, x in expected.items():
    if x is not None:
      np.testing.assert_allclose(got[name], x, rtol=1e-5)
  assert got["none"] is None


def test_clipping_each_shard_by_itself_differs():
  tree = _tree()
  got = _sharded(optax.clip_by_global_norm(0.5), tree, check_vma=False)
  expected = _update(optax.clip_by_global_norm(0.5), tree)
  assert not np.allclose(got["w"], expected["w"], rtol=1e-2)


@maps.every_map
def test_clipping_is_the_same_in_every_map(map_name):
  x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
  tx = optax_dist.clip_by_global_norm(
    0.5, maps.AXIS, param_specs=[P(maps.AXIS), P()]
  )
  own = np.ones((4, 2), np.float32)  # Equal on all.
  got = maps.run(
    map_name, lambda *leaves: _update(tx, [*leaves]), x, own, size=4
  )
  expected = _update(optax.clip_by_global_norm(0.5), [x, own[0]])
  np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(got[1][0], expected[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_wide_updates_are_clipped_in_their_own_precision(dtype):
  """Their squares were summed in float32, where they were infinite."""
  with jax.enable_x64(True):
    tree = jax.tree.map(lambda x: 1e20 * x.astype(dtype), _tree())
    tx = optax_dist.clip_by_global_norm(0.5, ("data", "model"))
    got = _sharded(tx, tree, check_vma=True)
    expected = _update(optax.clip_by_global_norm(0.5), tree)
  for name in SPECS.keys() - {"none"}:
    assert got[name].dtype == dtype
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-12)


def test_wide_and_narrow_updates_are_clipped_together():
  with jax.enable_x64(True):
    tree = _tree("float64") | {"b": _tree()["b"]}
    tx = optax_dist.clip_by_global_norm(0.5, ("data", "model"))
    got = _sharded(tx, tree, check_vma=True)
  norm = np.sqrt(
    sum(np.sum(np.square(x)) for x in tree.values() if x is not None)
  )
  for name in SPECS.keys() - {"none"}:
    assert got[name].dtype == tree[name].dtype
    np.testing.assert_allclose(got[name], tree[name] * (0.5 / norm), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_dtypes_are_kept(dtype):
  tree = jax.tree.map(lambda x: jnp.asarray(x, dtype), _tree())
  tx = optax_dist.clip_by_global_norm(0.5, ("data", "model"))
  got = _sharded(tx, tree, check_vma=True)
  norm = np.sqrt(
    sum(
      np.sum(np.square(np.abs(np.asarray(x, np.complex64))))
      for x in jax.tree.leaves(got)
    )
  )
  np.testing.assert_allclose(norm, 0.5, rtol=5e-3)
  assert {x.dtype.name for x in jax.tree.leaves(got)} == {dtype}


def test_rows_of_sparse_updates_count_once():
  slices = optax_dist.IndexedSlices(
    jnp.array([[3.0], [1.0], [3.0]]), jnp.array([2, 9, 2]), (9, 1)
  )
  slices = jax.tree.map(lambda x: x[None], slices)
  tx = optax_dist.clip_by_global_norm(1.0, "model", param_specs=P())
  clip = jax.vmap(lambda x: _update(tx, x), axis_name="model")
  # Row 2 is 6, the unused slot nothing: all is divided by 6.
  np.testing.assert_allclose(clip(slices).values[0, ::2, 0], [0.5, 0.5])


@pytest.mark.parametrize("check_vma", [False, True])
def test_clipping_communicates_one_number(check_vma):
  tx = optax_dist.clip_by_global_norm(
    0.5, "model", param_specs={"a": P("model"), "b": P(None, "model"), "c": P()}
  )
  specs = {"a": P("model"), "b": P(None, "model"), "c": P()}
  run = jax.shard_map(
    lambda tree: _update(tx, tree),
    mesh=_mesh(),
    in_specs=(specs,),
    out_specs=specs,
    check_vma=check_vma,
  )
  tree = {"a": jnp.ones(8), "b": jnp.ones((2, 4)), "c": jnp.ones(3)}
  text = jax.jit(run).lower(tree).compile().as_text()
  assert text.count(" all-reduce(") == 1


def test_invalid_arguments_are_refused():
  tx = optax_dist.clip_by_global_norm(1.0, ("data", "model"))
  with pytest.raises(
    ValueError, match=r"not track here .* axis 'data', 'model'"
  ):
    _sharded(tx, _tree(), check_vma=False)
  with pytest.raises(optax_dist.UnboundAxisError):
    _update(tx, _tree())
  tx = optax_dist.clip_by_global_norm(1.0, "x", param_specs={"a": P("x")})
  with pytest.raises(
    ValueError, match=r"`param_specs` must be a pytree of PartitionSpec"
  ):
    jax.vmap(lambda x: _update(tx, {"b": x}), axis_name="x")(jnp.ones(2))


def test_infinity_clips_nothing():
  tx = optax_dist.clip_by_global_norm(np.inf, "model", param_specs=P("model"))
  tree = jnp.array([3.0, 4.0])
  clipped = jax.vmap(lambda x: _update(tx, x), axis_name="model")(tree)
  np.testing.assert_array_equal(clipped, tree)
