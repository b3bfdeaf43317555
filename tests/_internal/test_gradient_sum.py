"""Tests of a replica's running sum of gradients, dense and sparse."""

import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist
from optax_dist import IndexedSlices
from optax_dist._internal import gradient_sum

N = 4
ROWS, WIDTH, SLOTS = 7, 2, 3


def _random_slices(rng, ticks):
  ids = rng.integers(0, ROWS, (ticks, N, SLOTS)).astype(np.int32)
  return ids, rng.normal(size=(ticks, N, SLOTS, WIDTH)).astype(np.float32)


def _oracle(ids, values, sparse_average):
  """The average of sparse gradients, each with its repeated rows summed first."""
  dense = np.zeros((len(ids), ROWS, WIDTH))
  touches = np.zeros(ROWS)
  for i in range(len(ids)):
    np.add.at(dense[i], ids[i], values[i])
    touches[np.unique(ids[i])] += 1
  if sparse_average == "gradients":
    return dense.mean(0)
  return dense.sum(0) / np.maximum(touches, 1)[:, None]


@pairwise.every_value(
  map_name=maps.NAMES, sparse_average=["touched", "gradients"]
)
def test_sparse_gradients_are_averaged_without_becoming_dense(
  map_name, sparse_average
):
  """Two ticks make a step; in the last tick of a step one replica is absent."""
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=2 * N - 1,
    total_num_replicas=N,
    max_staleness=None,  # An absent replica still counts in the next step.
    sparse_capacity={"table": 2 * SLOTS, "b": None},
    sparse_average=sparse_average,
  )
  params = {"table": np.zeros((ROWS, WIDTH), np.float32), "b": np.float32(0)}
  state = tx.init(params)
  ids, values = _random_slices(np.random.default_rng(0), 4)

  def step(state, ids, values, arrived):
    slices = IndexedSlices(values, ids, (ROWS, WIDTH))
    updates, state = tx.update(
      {"table": slices, "b": values[0, 0]}, state, params, arrived=arrived
    )
    assert updates["table"].values.shape == (N * 2 * SLOTS, WIDTH)
    return (updates["table"].to_dense(), updates["b"]), state

  run = maps.stepper(map_name, step, state, N)
  here = np.ones((4, N), bool)
  here[1, 2] = here[3, 0] = False
  for t in range(4):
    (table, b), state = run(state, ids[t], values[t], here[t])
    if t % 2:
      both = here[t - 1 : t + 1]
      pick = lambda x, t=t, both=both: x[t - 1 : t + 1][both]
      expected = _oracle(pick(ids), pick(values), sparse_average)
      np.testing.assert_allclose(b, pick(values)[:, 0, 0].mean(), rtol=1e-5)
    else:
      expected = np.zeros((ROWS, WIDTH))
      np.testing.assert_array_equal(b, 0)
    for i in range(N):
      np.testing.assert_allclose(table[i], expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_without_a_free_slot_is_dropped_as_a_whole_and_counted():
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=2 * N,
    total_num_replicas=N,
    sparse_capacity={"table": SLOTS, "b": None},
  )
  params = {"table": np.zeros((ROWS, WIDTH), np.float32), "b": np.float32(0)}
  state = tx.init(params)

  def step(state, ids):
    slices = IndexedSlices(jnp.ones((SLOTS, WIDTH)), ids, (ROWS, WIDTH))
    return tx.update({"table": slices, "b": jnp.float32(1)}, state, params)

  run = maps.stepper("vmap", step, state, N)
  first = np.tile(np.array([0, 1, 2], np.int32), (N, 1))
  second = first.copy()
  second[0] = [3, 1, 2]  # A fourth row; the others repeat theirs.
  _, state = run(state, first)
  _, state = run(state, second)
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.dropped["overflow"], [1, 0, 0, 0])
  np.testing.assert_array_equal(report.accumulated, [1, 2, 2, 2])
  sums = optax.tree.get(state, "gradient_sum")
  np.testing.assert_array_equal(sums["b"], [1, 2, 2, 2])
  np.testing.assert_array_equal(sums["table"].indices[0], [0, 1, 2])


def test_more_slots_than_the_capacity_are_refused_while_tracing():
  total = gradient_sum.init(jnp.zeros((ROWS, WIDTH)), SLOTS)
  many = IndexedSlices(jnp.zeros((4, WIDTH)), jnp.arange(4), (ROWS, WIDTH))
  with pytest.raises(
    ValueError, match=r"has 4 slots, but `sparse_capacity`.* 3"
  ):
    gradient_sum.check(many, total)


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_and_dense_gradients_must_match_their_sums(sparse):
  table = jnp.zeros((ROWS, WIDTH))
  slices = IndexedSlices(
    jnp.zeros((1, WIDTH)), jnp.zeros(1, jnp.int32), table.shape
  )
  total = gradient_sum.init({"t": table}, {"t": None if sparse else 3})
  kind = "sparse" if sparse else "dense"
  with pytest.raises(ValueError, match=rf"updates\['t'\] is {kind}"):
    gradient_sum.check({"t": slices if sparse else table}, total)


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True])
def test_capacities_are_checked(capacity):
  with pytest.raises(
    ValueError, match="`sparse_capacity` must be None or a pos"
  ):
    gradient_sum.init({"t": jnp.zeros((3, 2))}, {"t": capacity})


def test_capacity_may_be_a_numpy_integer():
  total = gradient_sum.init(jnp.zeros((3, 2)), np.int64(2))
  assert total.values.shape == (2, 2)


def test_a_scalar_has_no_rows():
  with pytest.raises(ValueError, match=r"params\['t'\] of shape \(\)"):
    gradient_sum.init({"t": jnp.zeros(())}, {"t": 1})
