"""The plan: what it recommends, why, and how uncertain it is."""

import math
import re

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate.plan import weight_of_step


@pytest.mark.parametrize(
  ("spec", "noise"),
  [
    ("bernoulli:1,10,0.1", math.inf),
    pytest.param("shifted-exponential:1,0.3", 8.0, marks=pytest.mark.nightly),
  ],
)
def test_recommendation_is_that_of_order_statistics(spec, noise):
  n, latency = 8, simulate.parse_latency(spec)
  plan = simulate.plan(latency, n, noise_scale=noise, cancel=True)
  # The k-th of n is the time of a step.
  draws = latency.draw(np.random.default_rng(1), 100_000 * n).reshape(n, -1)
  times = np.sort(draws, axis=0).mean(axis=1)
  weights = [weight_of_step(k, n, noise) for k in range(1, n + 1)]
  progress = np.array(weights) / times
  # Neighbours may be as good as equal; then either will do.
  chosen = plan.recommended.replicas_to_aggregate
  assert progress[chosen - 1] >= 0.995 * progress.max()
  assert plan.best_low <= chosen <= plan.best_high
  ks = [c.replicas_to_aggregate for c in plan.candidates]
  assert ks == list(range(1, n + 1))
  for candidate, expected in zip(plan.candidates, progress, strict=True):
    # Those that are far from the best were simulated less often.
    near = expected > 0.95 * progress.max()
    assert candidate.progress == pytest.approx(
      expected, rel=0.05 if near else 0.15
    )
    assert candidate.low <= candidate.progress <= candidate.high
  assert not plan.resampled
  assert sum(c.best for c in plan.candidates) == pytest.approx(1)


def _times(seconds):
  """A recording of one replica, whose steps are not in it."""
  return simulate.Recording([np.arange(len(seconds))], [seconds], [])


def test_late_replicas_finish_their_gradient_unless_that_is_cancelled():
  at_once, later = (
    simulate.plan(
      simulate.parse_latency("bernoulli:1,10,0.1"),
      8,
      cancel=cancel,
      steps=100,
      repetitions=2,
    ).candidates[5]
    for cancel in (True, False)
  )
  assert at_once.steps_per_second > 1.2 * later.steps_per_second


def test_few_recorded_times_give_a_wide_interval():
  rng = np.random.default_rng(0)
  few, many = (
    simulate.plan(_times(1 + rng.exponential(0.5, size)), 4, steps=100, seed=1)
    for size in (10, 5000)
  )
  assert few.resampled
  assert many.resampled
  width = lambda plan: (
    (plan.recommended.high - plan.recommended.low) / plan.recommended.progress
  )
  assert width(few) > 2 * width(many)


def test_waiting_for_all_is_best_if_all_are_equally_fast():
  plan = simulate.plan(simulate.parse_latency("constant:2"), 4, steps=10)
  assert plan.recommended.replicas_to_aggregate == 4
  assert plan.recommended.best == 1
  assert plan.recommended.steps_per_second == pytest.approx(0.5)
  assert plan.recommended.wasted == 0


def test_reason_compares_the_best_with_the_runner_up():
  plan = simulate.plan(
    simulate.parse_latency("bernoulli:1,10,0.01"), 8, cancel=True, steps=100
  )
  assert plan.recommended.replicas_to_aggregate == 7
  assert plan.runner_up.replicas_to_aggregate == 6
  # A step from k is worth k / (k + 8).
  assert re.fullmatch(
    r"k = 7: each step makes 8\.9 % more progress, at \d\.\d % (fewer|more)"
    r" steps/s, than k = 6",
    plan.reason,
  )
  alone = simulate.plan(simulate.parse_latency("constant:2"), 1, steps=5)
  assert alone.reason == "there is nothing else to choose"


def test_communication_is_part_of_a_step():
  plan = simulate.plan(
    simulate.parse_latency("constant:1"), 4, steps=20, communication=3.0
  )
  assert plan.candidates[-1].steps_per_second == pytest.approx(1 / 4)


def test_many_replicas_have_fewer_candidates():
  plan = simulate.plan(
    simulate.parse_latency("lognormal:0,0.5"), 100, steps=5, repetitions=2
  )
  ks = [c.replicas_to_aggregate for c in plan.candidates]
  assert ks == sorted(set(ks))
  assert len(ks) < 25
  assert ks[-5:] == [96, 97, 98, 99, 100]
  assert ks[0] == 1


def test_equal_seeds_give_equal_plans():
  run = lambda seed: simulate.plan(
    _times([1.0, 2.0, 5.0]), 4, steps=20, seed=seed
  )
  assert run(0) == run(0) != run(1)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"noise_scale": -1.0}, "`noise_scale` must be"),
    ({"noise_scale": math.nan}, "`noise_scale` must be"),
    ({"repetitions": 1}, "`repetitions` must be an integer of at least 2"),
    ({"communication": -1.0}, "`communication` must be"),
  ],
)
def test_bad_number_is_named(options, said):
  with pytest.raises(ValueError, match=said):
    simulate.plan(simulate.parse_latency("constant:1"), 4, **options)
