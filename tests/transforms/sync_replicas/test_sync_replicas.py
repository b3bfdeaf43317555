"""Tests of sync_replicas against a plain rule, under all kinds of map."""

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
from sync_replicas_oracle import Oracle

import optax_dist

N = 4
SGD = optax.sgd(1.0)
PARAMS = {
  "w": np.zeros((3, 2), np.float32),
  "b": np.zeros(2, np.float32),
  "n": None,
}


def _tx(needed, inner=SGD, **options):
  return optax_dist.sync_replicas(
    inner,
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=N,
    **options,
  )


def _gradients(rng, ticks):
  shape = (ticks, N)
  return {
    "w": rng.normal(size=(*shape, 3, 2)).astype(np.float32),
    "b": rng.normal(size=(*shape, 2)).astype(np.float32),
    "n": None,
  }


def _check_report(state, oracle):
  report = optax_dist.sync_report(state)
  assert report.global_step == oracle.global_step
  np.testing.assert_array_equal(report.accepted, oracle.ledger["accepted"])
  np.testing.assert_array_equal(report.absent, oracle.ledger["absent"])
  np.testing.assert_array_equal(report.local_step, oracle.local_step)
  np.testing.assert_array_equal(
    report.accumulated, [len(h) for h in oracle.held]
  )
  for reason in ("stale", "nonfinite"):
    np.testing.assert_array_equal(report.dropped[reason], oracle.ledger[reason])


def _run(
  map_name, tx, ticks, seed=0, *, bad=0.1, given_steps=False, oracle=None
):
  """Runs the transform and the oracle side by side on random events."""
  rng = np.random.default_rng(seed)
  gradients = _gradients(rng, ticks)
  arrived = rng.random((ticks, N)) < 0.7
  gradients["b"][rng.random((ticks, N)) < bad, 0] = np.nan
  state = tx.init(PARAMS)

  def step(state, grads, arrived, local_step):
    return tx.update(
      grads,
      state,
      PARAMS,
      arrived=arrived,
      local_step=local_step if given_steps else None,
    )

  run = maps.stepper(map_name, step, state, N)
  for t in range(ticks):
    grads = jax.tree.map(lambda x, t=t: x[t], gradients)
    late = np.maximum(0, oracle.global_step - rng.integers(0, 4, N)).astype(
      np.int32
    )
    updates, new_state = run(state, grads, arrived[t], late)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
    flat = np.concatenate([grads["w"].reshape(N, -1), grads["b"]], axis=1)
    expected = oracle.tick(flat, arrived[t], late if given_steps else None)
    for i in range(N):
      got = np.concatenate([np.ravel(updates["w"][i]), updates["b"][i]])
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert updates["n"] is None
    _check_report(state, oracle)
  assert oracle.global_step > 0
  return state


@maps.every_map
@pytest.mark.parametrize("needed", [1, 3, N, 2 * N + 1])
def test_sync_replicas_follows_the_rule(map_name, needed):
  tx = _tx(needed)
  _run(map_name, tx, 12, oracle=Oracle(N, needed))


@pairwise.every_value(
  needed=[2, N, N + 1], map_name=["pmap", "shard_map", "shard_map_vma"]
)
def test_sums_that_share_a_message_follow_the_rule(
  map_name, needed, monkeypatch
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  tx = _tx(needed, max_staleness=1)
  _run(map_name, tx, 12, oracle=Oracle(N, needed, 1))


@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma"])
def test_inner_state_is_right_with_sums_that_share_a_message(
  map_name, monkeypatch
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  tx = _tx(
    N, optax.sgd(0.5, momentum=0.5), max_staleness=1, variable_averages=0.9
  )
  rng = np.random.default_rng(0)
  state = tx.init(PARAMS)

  def step(state, gradient, arrived):
    updates = {"w": gradient, "b": gradient[0], "n": None}
    return tx.update(updates, state, PARAMS, arrived=arrived)

  runs = [maps.stepper(name, step, state, N) for name in (map_name, "vmap")]
  states = [state, state]
  for _ in range(8):
    gradient = rng.normal(size=(N, 3, 2)).astype(np.float32)
    gradient[rng.random(N) < 0.1, 0, 0] = np.nan
    arrived = rng.random(N) < 0.8
    result = [
      run(state, gradient, arrived)
      for run, state in zip(runs, states, strict=True)
    ]
    states = [state for _, state in result]
    chex.assert_trees_all_close(
      *((x, s.inner_state) for x, s in result), rtol=1e-6
    )
  assert 0 < states[0].global_step < 8


@pairwise.every_value(map_name=maps.NAMES, needed=[2, N + 1])
def test_bounded_staleness_and_weights_follow_the_rule(map_name, needed):
  tx = _tx(needed, max_staleness=2, staleness_weight="inverse")
  oracle = Oracle(N, needed, 2, lambda staleness: 1 / max(1, staleness))
  _run(map_name, tx, 10, given_steps=True, oracle=oracle)


@pytest.mark.parametrize("needed", [2, N + 1])
def test_staleness_weight_may_be_a_function(needed):
  tx = _tx(
    needed,
    max_staleness=None,
    staleness_weight=lambda s: 0.5 ** s.astype(jnp.float32),
  )
  oracle = Oracle(N, needed, None, lambda s: 0.5**s)
  _run("shard_map_vma", tx, 10, given_steps=True, oracle=oracle)


@hypothesis.settings(max_examples=5)
@hypothesis.given(
  seed=st.integers(0, 10**6),
  needed=st.integers(1, 2 * N),
  bound=st.sampled_from([0, 1, None]),
)
def test_random_events_follow_the_rule(seed, needed, bound):
  tx = _tx(needed, max_staleness=bound)
  _run("vmap", tx, 8, seed, bad=0.0, oracle=Oracle(N, needed, bound))


@pairwise.every_value(map_name=maps.NAMES, all_arrive=[False, True])
@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
def test_all_arrive_equals_pmean_and_the_inner_optimizer(map_name, all_arrive):
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  tx = _tx(N, inner, all_arrive=all_arrive)
  by_hand = optax.chain(optax_dist.cross_shard(maps.AXIS), inner)
  params = {"w": np.ones(3, np.float32)}
  gradients = np.random.default_rng(0).normal(size=(5, N, 3)).astype(np.float32)

  def compare(state, g):
    sync_state, hand_state = state
    got, sync_state = tx.update({"w": g}, sync_state, params)
    expected, hand_state = by_hand.update({"w": g}, hand_state, params)
    return (got, expected), (sync_state, hand_state)

  state = (tx.init(params), by_hand.init(params))
  run = maps.stepper(map_name, compare, state, N)
  for g in gradients:
    (got, expected), state = run(state, g)
    chex.assert_trees_all_close(got, expected, rtol=1e-6)
  assert optax_dist.sync_report(state).global_step == 5


def test_training_works_inside_one_scan():
  """State that is made and used inside the map never leaves it."""
  tx = optax_dist.sync_replicas(
    optax.sgd(0.1), maps.AXIS, replicas_to_aggregate=2 * N
  )
  x = np.random.default_rng(0).normal(size=(N, 6, 3)).astype(np.float32)
  loss = lambda w, x: jnp.sum(jnp.square(w - x))

  def train(w, xs):
    def body(carry, x):
      w, state = carry
      grads = jax.grad(loss)(optax_dist.local_params(w, maps.AXIS), x)
      updates, state = tx.update(grads, state, w)
      return (optax.apply_updates(w, updates), state), None

    (w, _), _ = jax.lax.scan(body, (w, tx.init(w)), xs)
    return w

  expected = np.zeros(3, np.float32)
  for t in range(0, 6, 2):
    expected -= 0.1 * np.mean(2 * (expected - x[:, t : t + 2]), axis=(0, 1))
  for map_name in ("vmap", "pmap", "shard_map_vma"):
    w = maps.Replicated(np.zeros(3, np.float32))
    got = maps.run(map_name, train, w, x, size=N)
    np.testing.assert_allclose(got, np.tile(expected, (N, 1)), rtol=1e-5)


@pytest.mark.parametrize("needed", [2, 2 * N])
def test_sum_is_cleared_after_its_step(needed):
  """Emptied by selection: a NaN that was summed must not stay."""
  tx = _tx(needed, reject_nonfinite=False)
  state = tx.init(0.0)
  run = maps.stepper("vmap", lambda state, g: tx.update(g, state), state, N)
  for value in (np.nan, 2.0):
    for _ in range(-(-needed // N)):
      updates, state = run(state, np.full(N, value, np.float32))
    np.testing.assert_array_equal(updates, -value)
    np.testing.assert_array_equal(state.replica.value.gradient_sum, 0)


def test_dropped_values_never_enter_the_arithmetic():
  """Trap 3: 0 * NaN is NaN, so a gradient is dropped by selection."""
  tx = _tx(2)
  state = tx.init(0.0)
  step = lambda state, g, here: tx.update(g, state, arrived=here)
  run = maps.stepper("vmap", step, state, N)
  gradients = np.array([1.0, np.nan, np.inf, 3.0], np.float32)
  updates, state = run(state, gradients, np.array([True, False, True, True]))
  np.testing.assert_allclose(updates, -2.0)
  assert np.isfinite(jax.tree.leaves(state)[0]).all()


def test_without_the_check_a_nan_spoils_the_mean_as_in_tensorflow():
  tx = _tx(N, reject_nonfinite=False)
  state = tx.init(0.0)
  run = maps.stepper("vmap", lambda s, g: tx.update(g, s), state, N)
  updates, _ = run(state, np.array([1.0, np.nan, 1.0, 1.0], np.float32))
  assert np.isnan(updates).all()


@maps.both_kinds
def test_variable_averages_follow_tensorflow(map_name):
  tx = _tx(
    N + 1,
    variable_averages=0.5,
    variables_to_average=lambda p: {"w": True, "b": False},
  )
  params = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}

  def step(carry, g):
    params, state = carry
    updates, state = tx.update(g, state, params)
    return (), (optax.apply_updates(params, updates), state)

  carry = (params, tx.init(params))
  run = maps.stepper(map_name, step, carry, N)
  average = np.zeros(2)
  for t in range(4):
    gradients = jax.tree.map(
      lambda x, t=t: np.full((N, *x.shape), t + 1.0, np.float32), params
    )
    _, carry = run(carry, gradients)
    params, state = carry
    if t % 2:  # Two ticks make a step.
      average += 0.5 * (np.asarray(params["w"]) - average)
    got = optax_dist.averaged_params(state, params)
    np.testing.assert_allclose(got["w"], average, rtol=1e-6)
    np.testing.assert_allclose(got["b"], params["b"])


def test_accumulator_has_the_chosen_dtype():
  tx = _tx(3 * N, optax.identity(), accumulator_dtype=jnp.float32)
  state = tx.init(jnp.zeros(1, jnp.bfloat16))
  assert optax.tree.get(state, "gradient_sum").dtype == jnp.float32
  run = maps.stepper("vmap", lambda s, g: tx.update(g, s), state, N)
  # 1 + 2**-8 is not a bfloat16, but a mean over three ticks needs the sum.
  for value in (1.0, 0.0078125, 0.0078125):
    updates, state = run(state, jnp.full((N, 1), value, jnp.bfloat16))
  assert updates.dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    updates.astype(np.float32), np.float32(jnp.bfloat16((1 + 2**-6) / 3))
  )


@pytest.mark.parametrize("params", [None, {}])
@pytest.mark.parametrize("all_arrive", [False, True])
def test_a_tree_without_parameters_counts_steps(params, all_arrive):
  tx = _tx(
    2 * N,
    optax.sgd(1.0, momentum=0.9),
    variable_averages=0.9,
    all_arrive=all_arrive,
  )
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  step = jax.jit(
    jax.vmap(
      lambda state: tx.update(params, state, params)[1],
      in_axes=(axes,),
      out_axes=axes,
      axis_name=maps.AXIS,
      axis_size=N,
    )
  )
  for expected in (0, 1, 1, 2):
    state = step(state)
    assert state.global_step == expected
