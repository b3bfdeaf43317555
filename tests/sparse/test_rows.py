"""Stock optax behind sparse updates: right numbers, or an error that helps."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist
from optax_dist import sparse

N, ROWS, WIDTH, SLOTS = 4, 11, 3, 5

#: Transformations without a state per row.
WITHOUT_ROWS = {
  "sgd": lambda: optax.sgd(0.5),
  "sgd(schedule)": lambda: optax.sgd(optax.linear_schedule(0.5, 0.1, 4)),
  "scale": lambda: optax.scale(2),
  "clip": lambda: optax.clip(0.1),
  "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.3),
  "normalize_by_update_norm": lambda: optax.normalize_by_update_norm(),
  "scale_by_sign": lambda: optax.scale_by_sign(),
  "chain": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.sgd(optax.constant_schedule(0.1))
  ),
}
#: What keeps a row of state for each row of a table.
WITH_ROWS = {
  "adam": lambda: optax.adam(0.1),
  "trace": lambda: optax.trace(0.9),
  "momentum": lambda: optax.sgd(0.1, momentum=0.9),
}


def _gradients(ticks=3):
  rng = np.random.default_rng(3)
  # Rows repeat within a replica and between replicas.
  ids = rng.integers(0, ROWS - 1, (ticks, N, SLOTS)).astype(np.int32)
  values = rng.normal(size=(ticks, N, SLOTS, WIDTH)).astype(np.float32)
  return ids, values, rng.normal(size=(ticks, N, 2)).astype(np.float32)


def _cross_shard(inner):
  return optax.chain(optax_dist.cross_shard(maps.AXIS), inner)


def _sync_replicas(inner):
  return optax_dist.sync_replicas(
    inner,
    maps.AXIS,
    replicas_to_aggregate=N,
    total_num_replicas=N,
    sparse_capacity={"table": SLOTS, "w": None},
    sparse_average="gradients",
  )


def _sync_replicas_dense(inner):
  return optax_dist.sync_replicas(
    inner, maps.AXIS, replicas_to_aggregate=N, total_num_replicas=N
  )


AGGREGATE = {
  "cross_shard": (_cross_shard, _cross_shard),
  "sync_replicas": (_sync_replicas, _sync_replicas_dense),
}


def _train(map_name, tx, dense, apply_updates=optax_dist.apply_updates):
  params = {"table": np.ones((ROWS, WIDTH), np.float32), "w": np.ones(2, "f4")}

  def step(carry, ids, values, w):
    params, state = carry
    table = sparse.IndexedSlices(values, ids, (ROWS, WIDTH))
    grads = {"table": table.to_dense() if dense else table, "w": w}
    updates, state = tx.update(grads, state, params)
    return (), (apply_updates(params, updates), state)

  carry = params, tx.init(params)
  run = maps.stepper(map_name, step, carry, N)
  for tick in zip(*_gradients(), strict=True):
    _, carry = run(carry, *tick)
  return jax.tree.map(np.asarray, carry[0])


@pairwise.every_value(behind=list(AGGREGATE), name=list(WITHOUT_ROWS))
def test_stock_optax_is_refused_with_the_remedy(behind, name):
  tx = AGGREGATE[behind][0](WITHOUT_ROWS[name]())
  with pytest.raises(
    (TypeError, ValueError), match=r"use optax_dist\.sparse\.row_wise\(tx\)"
  ):
    _train("vmap", tx, dense=False)


@pytest.mark.parametrize("behind", AGGREGATE)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_stock_optax_with_a_state_of_rows_is_refused(behind, name):
  tx = AGGREGATE[behind][0](WITH_ROWS[name]())
  # JAX's own error: a momentum is an array where the update is slices.
  with pytest.raises(ValueError, match=r"\['table'\](.|\n)*IndexedSlices"):
    _train("vmap", tx, dense=False)


@pairwise.every_value(
  map_name=["vmap", "shard_map_vma"],
  behind=list(AGGREGATE),
  name=list(WITHOUT_ROWS),
)
def test_row_wise_gives_the_numbers_of_dense_updates(map_name, behind, name):
  sparsely, densely = AGGREGATE[behind]
  inner = WITHOUT_ROWS[name]
  got = _train(map_name, sparsely(sparse.row_wise(inner())), dense=False)
  want = _train(map_name, densely(inner()), dense=True)
  for key in want:
    np.testing.assert_allclose(got[key], want[key], rtol=2e-5, atol=1e-6)
  np.testing.assert_array_equal(got["table"][-1], 1.0)
  assert np.abs(got["table"][:-1] - 1).max() > 0.01


@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
@pytest.mark.parametrize("behind", AGGREGATE)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_to_dense_gives_the_numbers_of_dense_updates(behind, name):
  sparsely, densely = AGGREGATE[behind]
  inner = WITH_ROWS[name]
  tx = sparsely(optax.chain(sparse.to_dense(), inner()))
  got = _train("vmap", tx, dense=False)
  want = _train("vmap", densely(inner()), dense=True)
  for key in want:
    np.testing.assert_allclose(got[key], want[key], rtol=2e-5, atol=1e-6)


def test_the_norm_counts_rows_once():
  twice = sparse.IndexedSlices(jnp.ones(2), jnp.array([7, 7]), (9,))
  tx = sparse.row_wise(optax.clip_by_global_norm(1.0))
  updates = twice, jnp.ones(5)
  clipped, _ = tx.update(updates, tx.init((jnp.ones(9), jnp.ones(5))))
  np.testing.assert_allclose(clipped[1], np.ones(5) / 3, rtol=1e-6)
  with pytest.raises(TypeError, match=r"row_wise\(tx\)"):
    jax.jit(optax.tree.norm)(updates)


def test_parameters_are_seen_by_row_and_none_passes():
  tx = sparse.row_wise(
    optax.chain(optax.zero_nans(), optax.add_decayed_weights(0.5))
  )
  params = {"table": jnp.arange(4.0), "w": jnp.ones(2), "frozen": jnp.ones(3)}
  rows = jnp.array([3, 4])
  updates = {
    "table": sparse.IndexedSlices(jnp.array([1.0, 0.0]), rows, (4,)),
    "w": jnp.zeros(2),
    "frozen": jnp.zeros(3),
  }
  new, _ = tx.update(updates, tx.init(params), params)
  assert new["table"].indices.tolist() == [3, 4]
  assert new["table"].values.tolist() == [2.5, 0.0]
  assert new["w"].tolist() == [0.5, 0.5]
  tx = sparse.row_wise(optax.scale(2.0))
  updates["frozen"] = None
  new, _ = tx.update(updates, tx.init(params), params)
  assert new["frozen"] is None
  assert new["table"].values.tolist() == [2.0, 0.0]


def test_extra_arguments_are_passed_on():
  def update(updates, state, params=None, *, factor):
    del params
    return jax.tree.map(lambda x: factor * x, updates), state

  tx = sparse.row_wise(
    optax.GradientTransformationExtraArgs(lambda _: (), update)
  )
  slices = sparse.IndexedSlices(jnp.ones(1), jnp.array([2]), (3,))
  assert tx.update(slices, (), factor=3.0)[0].values.tolist() == [3.0]


@pytest.mark.parametrize("apply", [optax.apply_updates, sparse.apply_updates])
def test_optax_applies_sparse_updates_too(apply):
  tx = _cross_shard(sparse.row_wise(optax.sgd(0.5)))
  got = _train("vmap", tx, dense=False, apply_updates=apply)
  want = _train("vmap", _cross_shard(optax.sgd(0.5)), dense=True)
  np.testing.assert_allclose(got["table"], want["table"], rtol=1e-5)


@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
@pytest.mark.parametrize(
  "stock",
  [
    optax.adam(0.1),
    optax.lion(0.1),
    optax.adamw(0.1),
    optax.chain(optax.clip(0.5), optax.sgd(0.1, 0.9)),
  ],
  ids=["adam", "lion", "adamw", "chain"],
)
def test_row_wise_equals_the_stock_rule_on_the_rows(stock):
  params = {"table": jnp.arange(10.0).reshape(5, 2), "b": jnp.ones(3)}
  rows = jnp.array([3, 1])
  lazy = sparse.row_wise(stock)
  part = {"table": params["table"][rows], "b": params["b"]}
  state, part_state = lazy.init(params), stock.init(part)
  assert jax.tree.structure(state) == jax.tree.structure(stock.init(params))
  start = params["table"]
  for step in range(3):
    values = jnp.full((2, 2), 0.1 * (step + 1))
    slices = sparse.IndexedSlices(values, rows, (5, 2))
    grads = {"table": slices, "b": jnp.ones(3)}
    updates, state = lazy.update(grads, state, params)
    params = optax_dist.apply_updates(params, updates)
    part_grads = {"table": values, "b": jnp.ones(3)}
    updates, part_state = stock.update(part_grads, part_state, part)
    part = optax.apply_updates(part, updates)
  np.testing.assert_allclose(params["table"][rows], part["table"], rtol=1e-6)
  np.testing.assert_allclose(params["b"], part["b"], rtol=1e-6)
  others = jnp.array([0, 2, 4])
  np.testing.assert_array_equal(params["table"][others], start[others])


@jax.numpy_dtype_promotion("standard")
def test_dense_gradients_go_through_as_they_are():
  stock = optax.adam(0.1)
  params = {"w": jnp.ones(3)}
  got = sparse.row_wise(stock).update(params, stock.init(params), params)
  want = stock.update(params, stock.init(params), params)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_unused_slots_change_nothing():
  lazy = sparse.row_wise(optax.sgd(0.1, 0.9))
  params = jnp.ones((5, 2))
  unused = sparse.IndexedSlices(jnp.ones((2, 2)), jnp.array([5, 5]), (5, 2))
  updates, state = lazy.update(unused, lazy.init(params), params)
  assert not updates.values.any()
  assert not updates.to_dense().any()
  assert not jnp.any(optax.tree.get(state, "trace"))


def test_gradients_are_cast_to_the_dtype_of_the_parameter():
  slices = sparse.IndexedSlices(jnp.ones((1, 2)), jnp.array([2]), (5, 2))
  params = jnp.ones((5, 2), jnp.bfloat16)
  lazy = sparse.row_wise(optax.sgd(0.1, 0.9))
  updates, state = lazy.update(slices, lazy.init(params), params)
  assert updates.dtype == jnp.bfloat16
  assert optax.tree.get(state, "trace").dtype == jnp.bfloat16


def test_a_mask_is_a_tree_like_the_parameters():
  inner = optax.masked(optax.sgd(0.5, 0.9), {"table": True, "w": False})
  tx = sparse.row_wise(inner)
  params = {"table": jnp.ones((3, 1)), "w": jnp.ones(2)}
  slices = sparse.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (3, 1))
  grads = {"table": slices, "w": jnp.ones(2)}
  updates, _ = tx.update(grads, tx.init(params), params)
  assert updates["table"].values.tolist() == [[-0.5]]
  assert updates["w"].tolist() == [1.0, 1.0]
