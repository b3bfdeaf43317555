"""Replicas with means of few bits, of whom owners of slices die."""

import threading

import embedded_runs as runs
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.runtime import endpoint

SIZE = 6 * 4032
OPTIONS = {
  "params": {"x": jnp.zeros(SIZE)},
  "opt": optax.sgd(0.1),
  "inline_bytes": 0,
  "wire": "int8",
  "fingerprint_every": 1,
}
TARGET = np.random.default_rng(3).normal(size=SIZE).astype("f4")


def train(target_step):
  def run(replica, result):
    while replica.global_step < target_step:
      # Noise of its own, and a target of all.
      noise = np.random.default_rng([replica.replica, result.computed])
      result.computed += 1
      own = TARGET + noise.normal(size=SIZE).astype("f4")
      outcome = replica.step({"x": replica.params["x"] - own})
      if outcome.finished:
        return

  return run


def owes(replica):
  kept = replica._participant.encoder.mean_feedback.residual(0, SIZE)
  return np.abs(kept).reshape(-1, 4032).max(1) > 0


@pytest.mark.parametrize("mean_wire", ["int4", "top_k"])
def test_an_owner_that_dies_loses_its_residual(mean_wire):
  """Amid a step: the others' slices move, and all stay the same to the bit."""
  world, died = endpoint.World(), threading.Event()
  options = OPTIONS | {
    "mean_wire": mean_wire,
    "k": 3,
    "n": 3,
    "quorum": {"lower_on_loss": True},
  }
  results = [runs.Result() for _ in range(4)]
  together, steps, made, owed = threading.Barrier(3), 30, [], []

  def one(replica, result):
    together.wait(60.0)
    try:
      train(5)(replica, result)
      owed.append(owes(replica))
      train(12)(replica, result)
    finally:
      if replica.replica == 2:
        died.set()
    again_is_in.wait(60.0)
    train(steps)(replica, result)

  again_is_in = threading.Event()

  def rest(replica, result):
    assert not owes(replica).any()
    again_is_in.set()
    train(steps)(replica, result)

  with runs.Faults({("gather", 2, 9): runs.kill}) as faults:
    threads = []
    for i in range(3):
      made.append(runs.make(world, i, **options))
      threads.append(runs.start(made[i], one, results[i]))
    assert died.wait(60.0)
    again = runs.make(world, 2, name="2 again", **options)
    threads.append(runs.start(again, rest, results[3]))
    runs.finish(threads)
  assert faults.done == [("gather", 2, 9)]
  assert isinstance(results[2].error, runs.Killed)
  alive = [results[i] for i in (0, 1, 3)]
  assert [r.error for r in alive] == [None] * 3
  prints = {coordinator.fingerprint((r.params, r.opt_state)) for r in alive}
  assert len(prints) == 1
  # Each owner kept what its own slice lacked, and nobody anything of another's.
  np.testing.assert_array_equal(sum(x.astype(int) for x in owed), np.ones(6))
  if mean_wire != "top_k":  # In so few steps too little of it has arrived.
    off = np.linalg.norm(alive[0].params["x"] - TARGET)
    assert off < 0.7 * np.linalg.norm(TARGET)


def test_with_feedback_all_of_a_gradient_arrives():
  """By both ways: the sum of the means is off by what is kept, and no more."""
  gradients = np.random.default_rng(0).normal(size=(2, SIZE)).astype("f4")
  steps = 25

  def same(replica, result):
    for _ in range(steps):
      assert replica.step({"x": jnp.asarray(gradients[replica.replica])})
    kept = replica._participant.encoder.mean_feedback.residual(0, SIZE)
    encoded = replica._participant.encoder._feedback.residual(0, SIZE)
    return np.asarray(replica.params["x"]), kept, encoded

  results = runs.run(
    same,
    2,
    **OPTIONS | {"opt": optax.sgd(1.0), "mean_wire": "int2"},
  )
  assert [r.error for r in results] == [None] * 2
  (first, *kept), (second, *other) = (r.value for r in results)
  np.testing.assert_array_equal(first, second)
  whole = -first + kept[0] + other[0] + (kept[1] + other[1]) / 2
  np.testing.assert_allclose(whole, steps * gradients.mean(0), atol=1e-3)
  assert np.abs(kept[0] + other[0]).max() > 0.1
