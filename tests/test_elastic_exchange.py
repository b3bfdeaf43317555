"""Tests of the elastic exchange as a pure function."""

import chex
import elastic_recordings
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.elastic_exchange import (
  elastic_exchange,
  sequential_exchange,
  simultaneous_exchange,
)


@pytest.mark.parametrize("id", elastic_recordings.STEPS)
def test_recorded_steps(id):
  """TensorFlow's workers, which meet the center one at a time, to the bit."""
  replay = elastic_recordings.Replay(id)
  center, global_step = replay.start, 0
  local = [replay.start] * replay.workers
  local_center = [replay.start] * replay.workers
  local_step = [0] * replay.workers
  for worker, event in replay.steps():
    own, met = local[worker], local_center[worker]
    own = [
      x - replay.lr * (g + replay.rho * (x - c))
      for x, g, c in zip(own, replay.gradients(event, own), met, strict=True)
    ]
    local_step[worker] += 1
    if local_step[worker] % replay.period == 0:
      own, center, met, _ = elastic_exchange(own, center, replay.rate)
      global_step += 1
    local[worker], local_center[worker] = own, met
    for i in range(replay.workers):
      replay.check(
        event,
        i,
        np.testing.assert_array_equal,
        local=local[i],
        local_center=local_center[i],
        center=center,
        local_step=local_step[i],
        global_step=global_step,
      )


def _replicas(seed, workers=4):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {"w": normal(workers, 3, 2), "b": [normal(workers)]}
  return params, {"w": normal(3, 2), "b": [normal()]}


def _rows(tree, i):
  return jax.tree.map(lambda x: x[i], tree)


def _oracle(params, center, rate, order, simultaneous):
  params = jax.tree.map(np.array, params)
  start = center
  for i in order:
    seen = start if simultaneous else center
    pull = jax.tree.map(lambda x, c: rate * (x - c), _rows(params, i), seen)
    for x, p in zip(
      jax.tree.leaves(params), jax.tree.leaves(pull), strict=True
    ):
      x[i] -= p
    center = jax.tree.map(np.add, center, pull)
  return params, center


@pytest.mark.parametrize("order", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize("rate", [0.3, jnp.float32(0.3), np.float64(0.3)])
def test_exchanges_of_stacked_replicas(order, rate):
  params, center = _replicas(0)
  turns = range(4) if order is None else order
  both = simultaneous_exchange(params, center, rate)
  expected = _oracle(params, center, 0.3, turns, simultaneous=True)
  chex.assert_trees_all_close((both.params, both.center), expected, rtol=1e-5)
  chex.assert_trees_all_equal(_rows(both.local_center, 2), center)

  turn = sequential_exchange(params, center, rate, order)
  expected = _oracle(params, center, 0.3, turns, simultaneous=False)
  chex.assert_trees_all_close((turn.params, turn.center), expected, rtol=1e-5)
  chex.assert_trees_all_equal(_rows(turn.local_center, turns[0]), center)
  chex.assert_trees_all_equal_shapes_and_dtypes(turn.params, params)
  with pytest.raises(AssertionError):  # The two are not the same thing.
    chex.assert_trees_all_close(turn.center, both.center, rtol=1e-3)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  rate=st.floats(0, 1.5), seed=st.integers(0, 99), workers=st.integers(1, 5)
)
def test_what_replicas_give_the_center_gets(rate, seed, workers):
  """The sum of replicas and center stays, as both get the same pulls."""
  params, center = _replicas(seed, workers)
  for exchange in (simultaneous_exchange, sequential_exchange):
    after = exchange(params, center, rate)
    total = lambda p, c: jax.tree.map(lambda x, y: x.sum(0) + y, p, c)
    chex.assert_trees_all_close(
      total(after.params, after.center),
      total(params, center),
      rtol=1e-4,
      atol=1e-4,
    )


def test_a_rate_of_one_swaps_a_lone_replica_with_its_center():
  params, center = _replicas(1)
  after = elastic_exchange(_rows(params, 0), center, 1.0)
  chex.assert_trees_all_close(after.params, center, rtol=1e-6, atol=1e-6)
  chex.assert_trees_all_close(
    after.center, _rows(params, 0), rtol=1e-6, atol=1e-6
  )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes_are_kept(dtype):
  params = {"a": jnp.ones((2, 3), dtype), "left_out": None}
  center = {"a": jnp.zeros(3, dtype), "left_out": None}
  for exchange in (simultaneous_exchange, sequential_exchange):
    for rate in (0.25, jnp.float32(0.25), np.float64(0.25)):
      after = exchange(params, center, rate)
      chex.assert_trees_all_equal_shapes_and_dtypes(after.params, params)
      chex.assert_trees_all_equal_shapes_and_dtypes(after.center, center)
