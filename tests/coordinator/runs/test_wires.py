"""What travels in a run: few bits of each number, and no byte too many."""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest
import waiting

import optax_dist
from optax_dist import compression
from optax_dist.coordinator import strategies
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)
from optax_dist.coordinator.runtime import endpoint

INNER = optax.sgd(0.1)


# How many times fewer bytes a wire has than float32.
FEWER = {"int4": 7.9, "int2": 15.7, "top_k": 112}


@pairwise.every_pair(
  wire=list(FEWER),
  inline_bytes=[0, 1 << 20],
  both={"up": False, "both": True},
)
def test_wires_of_few_bits_train_to_the_same_end(wire, inline_bytes, both):
  """Towards a target for each replica; both end near the mean of the targets."""
  size, steps, fewer = 2 * 4032, 60, FEWER[wire]
  targets = np.random.default_rng(1).normal(size=(2, size)).astype("f4")

  def train(replica, result):
    for _ in range(steps):
      own = {"x": replica.params["x"] - targets[replica.replica]}
      assert replica.step(own)
    return np.asarray(replica.params["x"]), replica.stats()["bytes_out"]

  results = runs.run(
    train,
    2,
    opt=optax.sgd(0.03),
    params={"x": jnp.zeros(size)},
    wire=wire,
    mean_wire=wire if both else "bfloat16",
    inline_bytes=inline_bytes,
    fingerprint_every=10,
  )
  assert [r.error for r in results] == [None] * 2
  (first, sent), (second, _) = (r.value for r in results)
  np.testing.assert_array_equal(first, second)
  goal = targets.mean(0)
  assert np.linalg.norm(first - goal) < 0.7 * np.linalg.norm(goal)
  if not inline_bytes:
    # Half of the gradient, in few bits, and half of the mean in bfloat16 or alike.
    mean = 2 / fewer if both else 1
    assert sent == pytest.approx(steps * size * (2 / fewer + mean), rel=0.02)


@pytest.mark.parametrize("wire", ["int8", "top_k"])
@pytest.mark.parametrize(
  "strategy",
  [
    strategies.elastic_average(moving_rate=0.5),
    decoupled_diloco.decoupled_diloco(fragments=1, period=4),
  ],
)
def test_what_does_not_add_up_does_not_travel_in_few_bits(strategy, wire):
  """Of parameters, or fragments, what is left out can't be made up for."""
  with pytest.raises(ValueError, match=rf"wire='{wire}' leaves out a part"):
    runs.make(
      endpoint.World(), 0, k=1, n=2, strategy=strategy, opt=INNER, wire=wire
    )


def test_local_updates_feed_back_as_the_transform_does():
  """SparseLoCo: a period of local steps, 3 % in 2 bits, and a decay."""
  size, period, rounds_ = 4032, 2, 4
  targets = np.random.default_rng(2).normal(size=(2, size)).astype("f4")

  def train(replica, result):
    target = targets[replica.replica]
    for _ in range(period * rounds_):
      assert replica.step({"x": replica.params["x"] - target}).accepted
    return np.asarray(replica.center["x"])

  results = runs.run(
    train,
    2,
    strategy=strategies.local_updates(
      optax.sgd(0.5), communication_period=period
    ),
    opt=optax.sgd(0.1),
    params={"x": jnp.zeros(size)},
    wire="top_k",
    mean_wire="bfloat16",
    error_feedback=0.9,
  )
  assert [r.error for r in results] == [None] * 2
  tx = optax_dist.local_updates(
    optax.sgd(0.1),
    optax.sgd(0.5),
    "data",
    communication_period=period,
    compression=compression.top_k(0.03, chunk=size, bits=2, error_feedback=0.9),
    num_replicas=2,
  )
  state = tx.init(jnp.zeros(size))
  axes = optax_dist.states.state_axes(state)

  def step(params, state, target):
    updates, state = tx.update(params - target, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(
    jax.vmap(step, axis_name="data", in_axes=(0, axes, 0), out_axes=(0, axes))
  )
  params = jnp.zeros((2, size))
  for _ in range(period * rounds_):
    params, state = step(params, state, jnp.asarray(targets))
  expected = np.asarray(params[0])
  assert np.count_nonzero(expected) > 300
  # The mean is a bfloat16, so that now and then another number is the largest.
  close = np.isclose(results[0].value, expected, rtol=0.02, atol=1e-3)
  assert close.mean() > 0.99


def test_bytes_are_counted_and_are_the_fewest_there_can_be():
  elements, steps = 3 * 64 * 40, 4
  size = 4 * elements

  def train(replica, result):
    before = replica.stats()["bytes_in"]
    for _ in range(steps):
      if replica.replica == 3:
        waiting.until(lambda: replica.is_stale)
        assert replica.abandon().reason == "stale"
      else:
        assert replica.step({"x": jnp.ones(elements)}).accepted
      # The fourth must see each step become stale: the others wait for it.
      together.wait()
    return replica.stats()["bytes_in"] - before

  together = threading.Barrier(4, timeout=60)
  results = runs.run(
    train, 4, k=3, params={"x": jnp.ones(elements)}, inline_bytes=0
  )
  assert [r.error for r in results] == [None] * 4
  for result in results[:3]:
    assert result.value == steps * 2 * size * 2 // 3
  assert results[3].value <= steps * size
  assert results[3].value % size == 0
