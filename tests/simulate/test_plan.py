"""The plan: as theory has it, and no surer than it can be."""

import json
import math

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate import theory
from optax_dist.simulate.plan import weight_of_step


@pytest.mark.parametrize(
  ("spec", "noise"),
  [("shifted-exponential:1,0.3", 16.0), ("bernoulli:1,10,0.1", math.inf)],
)
def test_the_recommendation_is_that_of_theory(spec, noise):
  n, latency = 16, simulate.parse_latency(spec)
  plan = simulate.plan(latency, n, noise_scale=noise, cancel=True, steps=400)
  hosts = latency.hosts(n, np.random.default_rng(0))
  weight = lambda k: weight_of_step(k, n, noise)
  best = theory.best_replicas_to_aggregate(hosts, weight)
  assert plan.best_low <= best <= plan.best_high
  # Neighbours may be as good as equal; then either will do.
  times, ks = theory.step_times(hosts), np.arange(1, n + 1)
  progress = weight(ks) / times
  chosen = plan.recommended.replicas_to_aggregate
  assert progress[chosen - 1] >= 0.995 * progress[best - 1]
  assert [c.replicas_to_aggregate for c in plan.candidates] == ks.tolist()
  for candidate, expected in zip(plan.candidates, progress, strict=True):
    assert candidate.progress == pytest.approx(expected, rel=0.02)
    slack = 1e-3
    assert candidate.low - slack <= candidate.progress
    assert candidate.progress <= candidate.high + slack
  assert not plan.resampled
  assert sum(c.best for c in plan.candidates) == pytest.approx(1)


def test_with_few_recorded_times_it_is_less_sure():
  rng = np.random.default_rng(0)
  few, many = (
    simulate.plan(
      simulate.Empirical(1 + rng.exponential(0.5, size)), 8, steps=100, seed=1
    )
    for size in (10, 5000)
  )
  assert few.resampled
  assert many.resampled
  width = lambda plan: (
    (plan.recommended.high - plan.recommended.low) / plan.recommended.progress
  )
  assert width(few) > 2 * width(many)


def test_waiting_for_all_is_best_where_nobody_is_late():
  plan = simulate.plan(simulate.parse_latency("constant:2"), 4, steps=10)
  assert plan.recommended.replicas_to_aggregate == 4
  assert plan.recommended.best == 1
  assert plan.recommended.steps_per_second == pytest.approx(0.5)
  assert plan.recommended.wasted == 0


def test_the_runner_up_and_the_reason():
  plan = simulate.plan(
    simulate.parse_latency("bernoulli:1,10,0.01"), 8, cancel=True, steps=200
  )
  assert plan.recommended.replicas_to_aggregate == 7
  assert plan.runner_up.replicas_to_aggregate == 6
  # A step from k is worth k / (k + 8).
  assert plan.reason.startswith("its steps are worth 8.89 % more than those")
  assert "from 6, and there are" in plan.reason
  assert plan.reason.endswith("% less of them")
  # All alike, and each of them costs.
  alike = simulate.plan(simulate.parse_latency("constant:2"), 4, steps=10)
  assert alike.runner_up.replicas_to_aggregate == 3
  assert simulate.plan(
    simulate.parse_latency("constant:2"), 1, steps=5
  ).reason == ("there is nothing else")


def test_communication_may_grow_with_the_gradients_in_a_step():
  latency = simulate.parse_latency("constant:1")
  plan = simulate.plan(
    latency, 4, steps=20, communication=lambda k: 3.0 if k == 4 else 0.5
  )
  assert plan.recommended.replicas_to_aggregate == 3
  rates = [c.steps_per_second for c in plan.candidates]
  # The first step has nothing before it; stale gradients are finished first.
  assert rates[3] == pytest.approx(20 / (20 + 19 * 3.0))
  assert rates[2] == pytest.approx(20 / (20 + 19 * 0.5), rel=0.1)


def test_many_replicas_have_fewer_candidates():
  plan = simulate.plan(simulate.parse_latency("lognormal:0,0.5"), 300, steps=5)
  ks = [c.replicas_to_aggregate for c in plan.candidates]
  assert ks == sorted(set(ks))
  assert len(ks) < 30
  assert ks[-8:] == list(range(293, 301))
  assert ks[0] == 1


def test_the_same_seed_gives_the_same_plan_and_progress_is_told():
  told = []
  run = lambda seed, **options: json.dumps(
    simulate.plan(
      simulate.Empirical([1.0, 2.0, 5.0]), 4, steps=20, seed=seed, **options
    ).report(),
    allow_nan=False,
  )
  assert run(0, progress=told.append) == run(0) != run(1)
  assert told == sorted(told)
  assert told[-1] == 1.0
  assert "null" in run(0, noise_scale=math.inf)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"noise_scale": -1.0}, "noise_scale must be at least 0"),
    ({"noise_scale": math.nan}, "noise_scale must be at least 0"),
    ({"repetitions": 1}, "repetitions must be at least 2"),
    ({"communication": -1.0}, "communication must be at least 0"),
  ],
)
def test_a_bad_number_is_named(options, said):
  with pytest.raises(ValueError, match=said):
    simulate.plan(simulate.parse_latency("constant:1"), 4, **options)
