"""The bytes of a run: numbers in 8 bits, and no more bytes than necessary."""

import threading

import embedded_runs as runs
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import waiting

from optax_dist import coordinator
from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import wire_formats

SIZE = 2 * 32 * 252


@pytest.mark.parametrize("inline_bytes", [0, 1 << 17])
@pytest.mark.parametrize(
  ("strategy", "rate", "off"),
  [
    (None, 0.03, 0.05),
    (
      strategies.local_updates(communication_period=3),
      0.05,
      0.05,
    ),
    (
      # The center moves to one replica after the other.
      strategies.elastic_average(moving_rate=0.3, communication_period=3),
      0.05,
      0.5,
    ),
  ],
)
def test_int8_trains_to_the_same_end(strategy, rate, off, inline_bytes):
  """Towards a target for each replica; all end near the mean of the targets."""
  targets = np.random.default_rng(1).normal(size=(2, SIZE)).astype("f4")
  # The center of a replica that is done before the other is near its own target.
  together = threading.Barrier(2, timeout=60.0)

  def train(replica, result):
    for _ in range(150):
      together.wait()
      own = {"x": replica.params["x"] - targets[replica.replica]}
      assert replica.step(own)
    return np.asarray(replica.center["x"]), replica.stats()["bytes_out"]

  results = runs.run(
    train,
    2,
    strategy=strategy,
    opt=optax.sgd(rate),
    params={"x": jnp.zeros(SIZE)},
    wire="int8",
    inline_bytes=inline_bytes,
    fingerprint_every=10,
  )
  assert [r.error for r in results] == [None] * 2
  goal = targets.mean(0)
  for result in results:
    center, sent = result.value
    assert np.linalg.norm(center - goal) < off * np.linalg.norm(goal)
  if strategy is None and not inline_bytes:
    # Half of the gradient, and half of the mean.
    assert sent == pytest.approx(150 * SIZE * 256 / 252, rel=0.01)


@pytest.mark.parametrize("wire", wire_formats.WIRES)
@pytest.mark.parametrize("inline_bytes", [0, 1 << 17])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_gradients_whose_mean_would_overflow_are_not_finite(
  k, inline_bytes, wire
):
  """Each number is; they are dropped before they spoil what all share.

  A step that needs one gradient has two if both come while another one is taken.
  """

  def train(replica):
    reasons = []
    for scale in (4e38 / max(k, 2), -4e38 / max(k, 2)):
      grads = {"x": jnp.full(SIZE, scale)}
      while not (outcome := replica.step(grads)).reason and not outcome.members:
        pass  # There is more to add to the sum.
      reasons.append(outcome.reason)
      together.wait()
    while replica.global_step < 3:
      replica.step({"x": jnp.ones(SIZE)})
    return reasons, np.asarray(replica.params["x"]), replica.global_step

  together = threading.Barrier(2, timeout=60.0)

  result = coordinator.run_embedded(
    train,
    2,
    optax.sgd(1.0),
    {"x": jnp.zeros(SIZE)},
    replicas_to_aggregate=k,
    wire=wire,
    inline_bytes=inline_bytes,
    timeout=60.0,
  )
  for reasons, params, step in result:
    assert reasons == ["non_finite", "non_finite"]
    np.testing.assert_allclose(params, -step, rtol=1e-6)


def test_bytes_are_counted_and_are_the_fewest_there_can_be():
  elements, steps = 3 * 64 * 40, 4
  size = 4 * elements

  def train(replica, result):
    before = replica.stats()["bytes_in"]
    # A round of three replicas would begin anew when the fourth joins.
    together.wait()
    for _ in range(steps):
      if replica.replica == 3:
        waiting.until(lambda: replica.is_stale)
        assert replica.abandon().reason == "stale"
      else:
        assert replica.step({"x": jnp.ones(elements)}).accepted
      # The fourth must see each step become stale: the others wait for it.
      together.wait()
    received = lambda: replica.stats()["bytes_in"] - before
    if replica.replica == 3:
      # It may know of a step before it has all of the mean.
      waiting.until(lambda: received() % size == 0)
    return received()

  together = threading.Barrier(4, timeout=60)
  results = runs.run(
    train, 4, k=3, params={"x": jnp.ones(elements)}, inline_bytes=0
  )
  assert [r.error for r in results] == [None] * 4
  for result in results[:3]:
    assert result.value == steps * 2 * size * 2 // 3
  assert results[3].value <= steps * size
