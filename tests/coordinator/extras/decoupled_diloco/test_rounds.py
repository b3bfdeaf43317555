"""How often a fragment is merged, and by whom: learners in virtual time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import virtual_learners

from optax_dist.coordinator import strategies
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)

PERIOD, FRAGMENTS, N, PERIODS = 20, 2, 4, 20
PARAMS = {"a": jnp.zeros(12), "b": jnp.zeros(11)}
INNER = optax.sgd(0.1)
_compiled = {}


def run(step_seconds, seed=0, quorum=2, **options):
  """Learners on a bowl: its bottom is at 1, and each one's own is about there."""
  key = tuple(options.items())
  if key not in _compiled:
    make = decoupled_diloco.decoupled_diloco(
      fragments=FRAGMENTS, period=PERIOD, **options
    )
    _compiled[key] = make(INNER, strategies.Quorum(quorum, N))
  rng = np.random.default_rng(seed)
  own = [rng.normal(1.0, 0.3, 12).astype(np.float32) for _ in range(N)]

  def gradient(number, params):
    at = own[number]
    return {"a": params["a"] - at, "b": params["b"] - at[:11]}

  learners = virtual_learners.VirtualLearners(
    _compiled[key], PARAMS, gradient, step_seconds, seed=seed, jitter=0.2
  )
  learners.run(PERIODS * PERIOD)
  return learners, np.mean(own, axis=0)


def per_period(learners):
  fastest = max(x.steps for x in learners.learners)
  return len(learners.merges) / FRAGMENTS / (fastest / PERIOD)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", [1.0, 2.0], ids=["alike", "one is slow"])
def test_a_fragment_is_merged_once_in_a_period(slow, seed):
  learners, _ = run([1.0, 1.0, 1.0, slow], seed, overlap=3)
  # Never more often than the fastest makes a period of steps.
  assert 0.85 < per_period(learners) < 1.05
  # And by all of them, though two would do: the others are called.
  members = [len(merge.members) for merge in learners.merges]
  assert np.mean(members) > 3.8
  steps = [x.steps for x in learners.learners]
  assert steps[0] / steps[-1] == pytest.approx(slow, rel=0.1)


@pytest.mark.parametrize("stale", [1, 0])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_outer_momentum_does_not_accumulate_over_missed_rounds(overlap, stale):
  """Even with no window, where half of all contributions miss their round."""
  for seed in range(3):
    learners, bottom = run(
      [1.0] * N, seed, overlap=overlap, max_staleness=stale
    )
    away = np.abs(learners.center["a"] - bottom).max()
    # It began at some 1, and two of four are not the mean of all. Where each one
    # gave at a turn of its own, it came to 200 and more.
    assert away < 1.0, (seed, away)


def test_a_lost_learner_does_not_block_the_others():
  learners, bottom = run([1.0] * N, overlap=3)
  before = len(learners.merges)
  learners.lose(0)
  learners.lose(1)
  learners.run(learners.now + 5 * PERIOD)
  assert len(learners.merges) - before == pytest.approx(5 * FRAGMENTS, abs=2)
  assert learners.merges[-1].members == (2, 3)
  learners.join(0)
  learners.run(learners.now + 5 * PERIOD)
  assert learners.merges[-1].members == (0, 2, 3)
  jax.block_until_ready(learners.center)
  assert np.abs(learners.center["a"] - bottom).max() < 0.4
