"""Tests of sync_replicas over a lazy optimizer: an embedding table, end to end."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pairwise

import optax_dist
from optax_dist import optimizers

N = 4
ROWS, WIDTH, WORDS = 11, 3, 5
TICKS = 6

#: Optimizers to which a row without a gradient is as one with a gradient of 0.
LAZY = {
  "gradient_descent": optimizers.gradient_descent(0.3),
  "adagrad": optimizers.adagrad(0.3),
}


def _loss(params, targets):
  return jnp.mean(jnp.square(params["table"] @ params["w"] - targets))


def _dense_gradient(params, ids, targets):
  read = lambda p: {"table": p["table"][ids], "w": p["w"]}
  return jax.grad(lambda p: _loss(read(p), targets))(params)


def _sparse_gradient(params, ids, targets):
  lookups = {"table": ids, "w": None}
  value_and_grad = optax_dist.sparse.lookup_value_and_grad(_loss)
  return value_and_grad(params, lookups, targets)[1]


def _train(map_name, inner, gradient, needed, ids, targets, arrived):
  sparse = gradient is _sparse_gradient
  tx = optax_dist.sync_replicas(
    inner,
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=N,
    sparse_capacity={"table": 2 * WORDS, "w": None} if sparse else None,
    # By as many as a dense gradient is divided by.
    sparse_average="gradients",
  )
  rng = np.random.default_rng(1)
  params = {
    "table": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "w": rng.normal(size=WIDTH).astype(np.float32),
  }

  def step(carry, ids, targets, arrived):
    params, state = carry
    at = optax_dist.local_params(params, maps.AXIS)
    grads = gradient(at, ids, targets)
    assert optax_dist.sparse.is_indexed_slices(grads["table"]) == sparse
    updates, state = tx.update(grads, state, params, arrived=arrived)
    return (), (optax_dist.apply_updates(params, updates), state)

  carry = params, tx.init(params)
  run = maps.stepper(map_name, step, carry, N)
  for t in range(TICKS):
    _, carry = run(carry, ids[t], targets[t], arrived[t])
  return jax.tree.map(np.asarray, carry[0]), optax_dist.sync_report(carry[1])


@pairwise.every_pair(
  map_name=["vmap", "shard_map_vma"], name=list(LAZY), needed=[3, 2 * N - 1]
)
def test_sparse_gradients_train_a_table_like_dense_ones(map_name, name, needed):
  rng = np.random.default_rng(0)
  # Rows repeat within a replica and between them; the last is never touched.
  ids = rng.integers(0, ROWS - 1, (TICKS, N, WORDS)).astype(np.int32)
  targets = rng.normal(size=(TICKS, N, WORDS)).astype(np.float32)
  arrived = np.ones((TICKS, N), bool)
  arrived[1, 2] = arrived[3, 0] = False
  both = [
    _train(map_name, LAZY[name], gradient, needed, ids, targets, arrived)
    for gradient in (_sparse_gradient, _dense_gradient)
  ]
  (sparse, report), (dense, dense_report) = both
  assert report.global_step == (TICKS if needed == 3 else 2)
  for a, b in zip(
    jax.tree.leaves(report), jax.tree.leaves(dense_report), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_allclose(sparse["table"], dense["table"], rtol=1e-5)
  np.testing.assert_allclose(sparse["w"], dense["w"], rtol=1e-5)
  start = np.random.default_rng(1).normal(size=(ROWS, WIDTH))
  np.testing.assert_array_equal(
    sparse["table"][-1], start[-1].astype("float32")
  )
  assert np.abs(sparse["table"] - start)[:-1].max() > 0.1
