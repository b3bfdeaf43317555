"""Tests of cross_shard against NumPy, under vmap, pmap and shard_map."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist

N = 4
GROUPS = [[0, 3], [1, 2]]


def _update(tx, updates, params=None):
  return tx.update(updates, tx.init(updates), params)[0]


def _gradients(seed=0, size=N):
  rng = np.random.default_rng(seed)
  return {
    "w": rng.normal(size=(size, 3, 2)).astype(np.float32),
    "b": rng.normal(size=(size, 2)).astype(np.float32),
    "scale": rng.normal(size=(size,)).astype(np.float32),
    "frozen": None,
    "empty": {},
  }


def _oracle(x, reduction="mean", groups=None):
  x = np.asarray(x, np.float64)
  out = np.empty_like(x)
  for group in groups or [list(range(len(x)))]:
    out[group] = getattr(np, reduction)(x[group], axis=0)
  return out


def _expected(tree, **kwargs):
  return jax.tree.map(functools.partial(_oracle, **kwargs), tree)


@pytest.mark.parametrize("transform", ["cross_shard", "sharded"])
def test_tensorflows_constants_name_a_mean_and_a_sum(transform):
  """The values of `tf.compat.v1.losses.Reduction.MEAN` and `SUM`."""
  gradients = np.array([[1.0], [2.0], [6.0], [-1.0]], np.float32)
  for reduction, expected in [("weighted_mean", 2.0), ("weighted_sum", 8.0)]:
    tx = optax_dist.cross_shard(maps.AXIS, reduction=reduction)
    if transform == "sharded":
      tx = optax_dist.sharded(
        optax.identity(), maps.AXIS, reduction=reduction, num_replicas=N
      )
    state = tx.init(gradients[0])
    axes = optax_dist.states.state_axes(state)
    update = jax.vmap(
      lambda g, state, tx=tx: tx.update(g, state)[0],
      in_axes=(0, axes),
      axis_name=maps.AXIS,
    )
    np.testing.assert_array_equal(update(gradients, state), [[expected]] * N)


# --- The same numbers under vmap, pmap and shard_map -------------------------


@pairwise.every_pair(
  map_name=maps.NAMES,
  reduction=["mean", "sum"],
  groups=[None, GROUPS, [[2, 0, 3, 1]], [[0], [1], [2], [3]]],
)
def test_reduces_updates_that_differ_between_replicas(
  map_name, reduction, groups
):
  tx = optax_dist.cross_shard(
    maps.AXIS, reduction=reduction, axis_index_groups=groups
  )
  gradients = _gradients()
  got = maps.run(map_name, functools.partial(_update, tx), gradients, size=N)
  chex.assert_trees_all_close(
    got,
    _expected(gradients, reduction=reduction, groups=groups),
    rtol=1e-5,
    atol=1e-6,
  )
  # Replicas that aggregate together must not drift apart by a single bit.
  for group in groups or [range(N)]:
    for i in group:
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x, i=i: x[i], got),
        jax.tree.map(lambda x, group=group: x[group[0]], got),
      )


def _loss(params, x):
  return jnp.sum(jnp.square(x @ params["w"] + params["b"]))


@pairwise.every_pair(
  map_name=maps.NAMES,
  reduction=["mean", "sum"],
  local={"plain": False, "local_params": True},
)
def test_gradient_of_replicated_parameters_is_reduced_once(
  map_name, reduction, local
):
  """Trap 1: under check_vma the plain gradient is summed before it arrives."""
  rng = np.random.default_rng(1)
  params = {
    "w": rng.normal(size=(3, 2)).astype(np.float32),
    "b": np.ones(2, np.float32),
  }
  x = rng.normal(size=(N, 3)).astype(np.float32)
  tx = optax_dist.cross_shard(maps.AXIS, reduction=reduction)

  def step(params, x):
    at = optax_dist.local_params(params, maps.AXIS) if local else params
    return _update(tx, jax.grad(_loss)(at, x), params)

  got = maps.run(map_name, step, maps.Replicated(params), x, size=N)
  residual = 2 * (x @ params["w"] + params["b"])
  own = {"w": np.einsum("ni,nj->nij", x, residual), "b": residual}
  chex.assert_trees_all_close(
    got, _expected(own, reduction=reduction), rtol=1e-5, atol=1e-5
  )


def test_plain_pmean_of_a_summed_gradient_is_too_large():
  """A plain pmean is N times too large here, so the test above can fail."""
  x = np.arange(1, 1 + N, dtype=np.float32).reshape(N, 1)
  values = {}

  def step(w, x):
    g = jax.grad(lambda w: jnp.sum(w * x))(w)
    tx = optax_dist.cross_shard(maps.AXIS)
    return {"pmean": jax.lax.pmean(g, maps.AXIS), "cross_shard": _update(tx, g)}

  values = maps.run(
    "shard_map_vma", step, maps.Replicated(np.float32(1.0)), x, size=N
  )
  np.testing.assert_allclose(values["cross_shard"], x.mean(), rtol=1e-6)
  np.testing.assert_allclose(values["pmean"], N * x.mean(), rtol=1e-6)


@maps.every_map
def test_mixed_dtypes_are_kept(map_name):
  gradients = {
    "half": np.full((N, 2), 1.5, np.float16),
    "brain": np.asarray([[0.5]] * N, jnp.bfloat16),
    "single": np.ones((N, 2), np.float32),
    "complex": np.ones((N, 1), np.complex64) * 1j,
    "scalar": np.ones((N,), np.float32),
  }
  tx = optax_dist.cross_shard(maps.AXIS, reduction="sum")
  got = maps.run(map_name, functools.partial(_update, tx), gradients, size=N)
  chex.assert_trees_all_equal_shapes_and_dtypes(got, gradients)
  chex.assert_trees_all_equal(got, jax.tree.map(lambda x: N * x, gradients))


def _train(tx, gradient, params, batches):
  """As in an optimizer's loop; the state varies over axes if its parameters do."""
  state = tx.init(params)
  for batch in batches:
    updates, state = tx.update(
      gradient(params, batch), state, params, value=1.0
    )
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize("map_name", ["vmap", "shard_map", "shard_map_vma"])
@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
def test_chained_training_equals_a_single_replica_on_the_whole_batch(map_name):
  rng = np.random.default_rng(2)
  params = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
  x = rng.normal(size=(3, N, 3)).astype(np.float32)
  single = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  multi = optax.chain(optax_dist.cross_shard(maps.AXIS), single)
  train = functools.partial(_train, multi, jax.grad(_loss))
  got = maps.run(
    map_name, train, maps.Replicated(params), x.swapaxes(0, 1), size=N
  )
  mean_loss = lambda p, xs: jnp.mean(jax.vmap(lambda x: _loss(p, x))(xs))
  alone = jax.jit(functools.partial(_train, single, jax.grad(mean_loss)))
  expected = alone(params, x)
  for i in range(N):
    chex.assert_trees_all_close(
      jax.tree.map(lambda v, i=i: v[i], got), expected, rtol=1e-5, atol=1e-6
    )


def _slices(reduce_ids):
  rng = np.random.default_rng(5)
  ids = rng.integers(0, 6, (N, 4)).astype(np.int32)
  values = rng.normal(size=(N, 4, 2)).astype(np.float32)
  dense = np.zeros((N, 6, 2), np.float32)
  for i in range(N):
    np.add.at(dense[i], ids[i], values[i])
  return ids, values, reduce_ids(dense)


@pairwise.every_pair(
  map_name=maps.NAMES, reduction=["mean", "sum"], groups=[None, GROUPS]
)
def test_sparse_updates_give_the_same_as_dense_ones(
  map_name, reduction, groups
):
  tx = optax_dist.cross_shard(
    maps.AXIS, reduction=reduction, axis_index_groups=groups
  )
  ids, values, expected = _slices(
    functools.partial(_oracle, reduction=reduction, groups=groups)
  )

  def step(ids, values):
    updates = {
      "table": optax_dist.IndexedSlices(values, ids, (6, 2)),
      "b": values,
    }
    got = _update(tx, updates)
    assert got["table"].values.shape == (len((groups or [range(N)])[0]) * 4, 2)
    return got["table"].to_dense(), got["b"]

  table, b = maps.run(map_name, step, ids, values, size=N)
  np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    b, _oracle(values, reduction, groups), rtol=1e-5, atol=1e-6
  )


# --- Updates that do not vary over a tracked axis ----------------------------


@maps.tracked_map
def test_gradient_of_a_mean_loss_is_not_reduced_again(map_name):
  x = np.arange(N, dtype=np.float32)

  def step(w, x):
    g = jax.grad(lambda w: jax.lax.pmean(w * x, maps.AXIS))(w)
    mean = optax_dist.cross_shard(maps.AXIS, invariant_updates="reduced")
    total = optax_dist.cross_shard(
      maps.AXIS, invariant_updates="reduced", reduction="sum"
    )
    return _update(mean, (g, x)), _update(total, (g, x))

  w = maps.Replicated(np.float32(2.0))
  (g_mean, x_mean), (g_sum, x_sum) = maps.run(map_name, step, w, x, size=N)
  np.testing.assert_allclose(g_mean, x.mean())
  np.testing.assert_allclose(g_sum, x.mean())
  np.testing.assert_allclose(x_mean, x.mean())
  np.testing.assert_allclose(x_sum, x.sum())


@maps.tracked_map
def test_an_update_that_arrives_summed_is_not_communicated(map_name):
  tx = optax_dist.cross_shard(maps.AXIS)
  args = (
    maps.Replicated({"w": np.ones(2, np.float32)}),
    np.ones((N, 2), np.float32),
  )
  step = lambda w, x: _update(tx, jax.grad(lambda w: jnp.sum(w["w"] * x))(w))
  jaxpr = str(jax.make_jaxpr(maps.mapped(map_name, step, args, N))(*args))
  assert jaxpr.count("psum") == 1, jaxpr  # The gradient's own.


@maps.both_kinds
def test_steps_share_one_compilation(map_name):
  tx = optax_dist.cross_shard(maps.AXIS)
  traces = []

  def step(g):
    traces.append(None)
    return _update(tx, g)

  args = ({"a": np.ones((N, 2), np.float32)},)
  run = maps.mapped(map_name, step, args, N)
  for scale in range(3):
    run(jax.tree.map(lambda x, scale=scale: scale * x, args[0]))
  assert len(traces) == 1


# --- Random trees and groups -------------------------------------------------

_shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
_leaves = st.tuples(_shapes, st.sampled_from(["float32", "float16"]))
_trees = st.recursive(
  st.one_of(_leaves, st.none()),
  lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner)
  ),
  max_leaves=6,
)
_is_leaf = lambda x: isinstance(x, tuple)


@st.composite
def _partitions(draw):
  order = draw(st.permutations(range(N)))
  size = draw(st.sampled_from([1, 2, 4]))
  return [list(order[i : i + size]) for i in range(0, N, size)]


@pytest.mark.parametrize("map_name", ["vmap", "pmap", "shard_map_vma"])
@hypothesis.settings(max_examples=8)
@hypothesis.given(
  tree=_trees, groups=_partitions(), reduction=st.sampled_from(["mean", "sum"])
)
def test_random_trees_and_groups_are_reduced(map_name, tree, groups, reduction):
  rng = np.random.default_rng(0)
  tree = jax.tree.map(
    lambda leaf: rng.integers(-8, 8, (N, *leaf[0])).astype(leaf[1]),
    tree,
    is_leaf=_is_leaf,
  )
  tx = optax_dist.cross_shard(
    maps.AXIS, axis_index_groups=groups, reduction=reduction
  )
  if not jax.tree.leaves(tree):
    assert _structure_survives(tx, tree)
    return
  got = maps.run(map_name, functools.partial(_update, tx), tree, size=N)
  chex.assert_trees_all_equal_shapes_and_dtypes(got, tree)
  # Small integers add up exactly, so the comparison can be exact.
  expected = jax.tree.map(
    lambda x: _oracle(x, reduction, groups).astype(x.dtype), tree
  )
  chex.assert_trees_all_equal(got, expected)


def _structure_survives(tx, tree):
  step = lambda _: (
    jax.tree.structure(_update(tx, tree)) == jax.tree.structure(tree)
  )
  return bool(
    jax.vmap(lambda x: jnp.asarray(step(x)), axis_name=maps.AXIS)(
      jnp.ones(N)
    ).all()
  )
