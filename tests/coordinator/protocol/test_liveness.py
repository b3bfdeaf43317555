"""Deadlines that follow what is seen, in virtual time: how often they are wrong."""

import numpy as np
import pytest

from optax_dist.coordinator.protocol import liveness

# As a watch over steps might have it; the floor is below all that comes here.
RULE = liveness.Rule(floor=0.01, first=60.0, ceiling=600.0)


def enqueue(seen, durations):
  """How many come too late."""
  late = 0
  for seconds in durations:
    late += seconds > seen.deadline
    seen.add(seconds)
  return late


def steps(rng, count, bursts=False, compilations=2):
  """Times of steps: lognormal(0, 0.6), after compilations."""
  result = rng.lognormal(0.0, 0.6, count)
  at = int(rng.exponential(200.0)) if bursts else count
  while at < count:
    # Ten steps take ten times as long.
    result[at : at + 10] *= 10.0
    at += 10 + int(rng.exponential(200.0))
  return np.concatenate([rng.uniform(20.0, 55.0, compilations), result])


@pytest.mark.parametrize("bursts", [False, True])
def test_at_most_one_in_a_hundred_deadlines_is_wrong(bursts):
  rng = np.random.default_rng(3)
  late = total = 0
  for _ in range(10):
    seen = liveness.Silence(RULE)
    durations = steps(rng, 1000, bursts)
    late += enqueue(seen, durations.tolist())
    total += len(durations)
  # Bursts are seen for the first time by everyone.
  assert late / total <= (0.01 if bursts else 0.001)


@pytest.mark.parametrize("scale", [0.02, 1.0, 20.0])
def test_deadline_is_within_three_99th_percentiles(scale):
  rng = np.random.default_rng(5)
  ratios = []
  for _ in range(20):
    seen = liveness.Silence(RULE)
    enqueue(seen, (scale * steps(rng, 1500)).tolist())
    ratios.append(seen.deadline / (scale * np.exp(0.6 * 2.3263)))
  assert max(ratios) <= 3.0
  assert min(ratios) >= 2.0


def test_deadline_is_generous_before_enough_was_seen():
  seen = liveness.Silence(RULE)
  assert seen.deadline == 60.0
  enqueue(seen, [0.1] * (RULE.least - 1))
  assert seen.deadline == 60.0
  seen.add(0.1)
  assert 0.25 <= seen.deadline <= 0.27
  # A longer observation makes the deadline more generous still.
  slow = liveness.Silence(RULE)
  slow.add(100.0)
  assert 250.0 <= slow.deadline <= 263.0


def test_deadline_follows_a_change_of_pace():
  seen = liveness.Silence(RULE)
  enqueue(seen, [1.0] * 2000)
  # A few slow ones are no reason yet, and many are.
  enqueue(seen, [10.0] * 5)
  assert seen.deadline < 3.0
  enqueue(seen, [10.0] * 30)
  assert seen.deadline >= 25.0
  enqueue(seen, [1.0] * 5000)
  assert seen.deadline < 3.0
