"""Tests of resuming sync_replicas on another number of replicas."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import IndexedSlices


def _make(size, **kwargs):
  return optax_dist.sync_replicas(
    optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=9,
    total_num_replicas=size,
    **kwargs,
  )


def _run(size, state, gradients, arrived=None):
  tx = _make(size)
  arrived = np.ones(size, bool) if arrived is None else np.array(arrived)
  step = lambda state, g, here: tx.update(g, state, arrived=here)
  return maps.stepper("vmap", step, state, size)(
    state, np.asarray(gradients, np.float32), arrived
  )


def _four_with_gradients():
  state = _make(4).init(np.float32(0))
  _, state = _run(4, state, [1, 2, 3, 4])
  _, state = _run(4, state, [1, 2, 3, 4], [True, True, True, False])
  return state  # Holds 2 + 4 + 6 + 4 = 16 in 7 gradients.


def test_fold_keeps_every_gradient():
  state = optax_dist.states.resize_replicas(
    _four_with_gradients(), 3, departed="fold"
  )
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.accumulated, [3, 2, 2])
  np.testing.assert_array_equal(report.accepted, [3, 2, 2])
  updates, state = _run(3, state, [10, 20, 30], [True, True, False])
  np.testing.assert_allclose(updates, -(16 + 30) / 9)
  assert optax_dist.sync_report(state).global_step == 1


def test_drop_counts_the_dropped_gradients():
  state = optax_dist.states.resize_replicas(
    _four_with_gradients(), 2, departed="drop"
  )
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.accumulated, [2, 2])
  np.testing.assert_array_equal(report.dropped["departed"], [2, 1])
  np.testing.assert_array_equal(report.accepted, [4, 3])
  ledger = report.accumulated + report.dropped["departed"]
  np.testing.assert_array_equal(ledger, report.accepted)


def test_additional_replicas_start_empty():
  state = optax_dist.states.resize_replicas(
    _four_with_gradients(), 6, departed="fold"
  )
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.accumulated, [2, 2, 2, 1, 0, 0])
  updates, state = _run(6, state, [0] * 4 + [5, 6], [False] * 4 + [True, True])
  np.testing.assert_allclose(updates, -(16 + 11) / 9)


@pytest.mark.parametrize("departed", ["fold", "drop"])
@pytest.mark.parametrize("size", [2, 6])
def test_random_keys_survive_resizing(size, departed):
  params = {"w": jnp.zeros(2), "key": jax.random.key(0)}
  make = lambda size: optax_dist.sync_replicas(
    optax.masked(optax.sgd(0.1), {"w": True, "key": False}),
    "data",
    replicas_to_aggregate=3,
    total_num_replicas=size,
  )
  state = optax_dist.states.resize_replicas(
    make(4).init(params), size, departed=departed
  )
  kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert kinds(state) == kinds(make(size).init(params))


def test_a_new_replica_is_at_the_current_step():
  state = _four_with_gradients()
  _, state = _run(4, state, [0, 0, 0, 0])
  assert optax_dist.sync_report(state).global_step == 1
  state = optax_dist.states.resize_replicas(state, 5, departed="fold")
  np.testing.assert_array_equal(
    optax_dist.sync_report(state).local_step, [1] * 5
  )


@pytest.mark.parametrize("size", [1, 3, 8])
def test_sparse_sums_fold_too(size):
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=9,
    total_num_replicas=4,
    sparse_capacity=6,
  )
  state = tx.init(np.zeros((5, 2), np.float32))
  ids = np.array([[0, 1], [1, 2], [2, 3], [4, 4]], np.int32)

  def step(state, ids):
    return tx.update(IndexedSlices(jnp.ones((2, 2)), ids, (5, 2)), state)

  _, state = maps.stepper("vmap", step, state, 4)(state, ids)
  state = optax_dist.states.resize_replicas(state, size, departed="fold")
  total = optax.tree.get(state, "gradient_sum")
  assert total.touches.shape == (size, 6)
  dense = jnp.zeros((5, 2)).at[total.indices].add(total.values, mode="drop")
  np.testing.assert_array_equal(dense[:, 0], [1, 2, 2, 1, 2])
  np.testing.assert_array_equal(total.touches.sum(), 7)


def test_sparse_sums_that_do_not_fit_are_refused():
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=9,
    total_num_replicas=2,
    sparse_capacity=1,
  )
  state = tx.init(np.zeros((5, 2), np.float32))
  step = lambda state, ids: tx.update(
    IndexedSlices(jnp.ones((1, 2)), ids, (5, 2)), state
  )
  ids = np.array([[0], [1]], np.int32)
  _, state = maps.stepper("vmap", step, state, 2)(state, ids)
  with pytest.raises(ValueError, match="departed='drop'"):
    optax_dist.states.resize_replicas(state, 1, departed="fold")


def test_state_of_another_transform_is_refused():
  with pytest.raises(ValueError, match="no state of sync_replicas"):
    optax_dist.states.resize_replicas(
      optax.sgd(1.0).init(0.0), 2, departed="fold"
    )


def test_state_without_a_replica_axis_is_refused():
  own = jax.tree.map(lambda x: x[0], _make(2).init(0.0).replica)
  state = _make(2).init(0.0)._replace(replica=own)
  with pytest.raises(ValueError, match="one leading replica axis"):
    optax_dist.states.resize_replicas(state, 2, departed="fold")


# --- Every replica arrives on every tick: no count travels -------------------


def _all_arrive(needed, size):
  return optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=size,
    all_arrive=True,
  )


@pytest.mark.parametrize(
  ("needed", "sizes", "departed"),
  [
    (16, [4, 8, 4], "fold"),
    (16, [8, 3, 5], "drop"),
    (16, [8, 16, 8], "fold"),
    (9, [2, 7, 1, 8], "fold"),
    (5, [4, 3, 4, 2], "drop"),
  ],
)
def test_means_are_exact_through_several_resizes(needed, sizes, departed):
  rng = np.random.default_rng(needed)
  state = _all_arrive(needed, sizes[0]).init(np.float32(0))
  # The oracle: what each replica holds, as lists.
  held = [[] for _ in range(sizes[0])]
  steps = 0
  for size in [*sizes, sizes[0], *sizes]:
    if size != len(held):
      state = optax_dist.states.resize_replicas(state, size, departed=departed)
      folded = [[] for _ in range(size)]
      for i, own in enumerate(held):
        if i < size or departed == "fold":
          folded[i % size] += own
      held = folded
    tx = _all_arrive(needed, size)
    run = maps.stepper("vmap", lambda s, g, tx=tx: tx.update(g, s), state, size)
    for _ in range(3):
      g = rng.normal(size=size).astype(np.float32)
      updates, state = run(state, g)
      for own, x in zip(held, g, strict=True):
        own.append(x)
      everything = [x for own in held for x in own]
      if len(everything) >= needed:
        steps += 1
        np.testing.assert_allclose(updates, np.mean(everything), rtol=1e-5)
        held = [[] for _ in held]
      else:
        np.testing.assert_array_equal(updates, 0)
      assert int(state.global_step) == steps
      report = optax_dist.sync_report(state)
      np.testing.assert_array_equal(report.accumulated, list(map(len, held)))
  assert steps > 3


def test_state_without_sums_cannot_accumulate():
  state = _all_arrive(4, 4).init(np.float32(0))
  state = optax_dist.states.resize_replicas(state, 2, departed="fold")
  tx = _all_arrive(4, 2)
  run = maps.stepper("vmap", lambda s, g: tx.update(g, s), state, 2)
  with pytest.raises(ValueError, match="need a sum, and this state holds none"):
    run(state, np.ones(2, np.float32))


# --- Where the state lies ----------------------------------------------------


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_state_on_a_mesh_is_resized(kind):
  kind = getattr(jax.sharding.AxisType, kind)
  expected = optax_dist.states.resize_replicas(
    _four_with_gradients(), 3, departed="fold"
  )
  mesh = jax.make_mesh((4,), (maps.AXIS,), axis_types=(kind,))
  state = _four_with_gradients()
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  state = optax_dist.states.place(jax.device_get(state), mesh, specs)
  with jax.set_mesh(mesh):
    smaller = optax_dist.states.resize_replicas(state, 3, departed="fold")
  jax.tree.map(np.testing.assert_array_equal, smaller, expected)
