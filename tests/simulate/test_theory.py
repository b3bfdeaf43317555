"""The simulator against order statistics, at 200,000 steps, within 1 %."""

import math

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate import theory

N = 16
KS = (1, 8, 14, 16)


def _hosts(spec, n=N, seed=0):
  latency = simulate.parse_latency(spec)
  # As the simulator chooses who is slow.
  first = np.random.SeedSequence(seed).spawn(1)[0]
  return latency, latency.hosts(n, np.random.default_rng(first))


def _simulated(latency, k, n=N, steps=200_000):
  timing = simulate.simulate_timing(
    simulate.sync_replicas(k, cancel=True), latency, n, steps=steps
  )
  return 1 / timing.steps_per_second


@pytest.mark.parametrize(
  "spec",
  [
    "constant:0.3",
    "exponential:2",
    "shifted-exponential:0.5,2",
    "lognormal:0,1",
    "pareto:1,3",
    "gamma:0.5,1",
    "bernoulli:1,5,0.1",
    "slow-hosts:0.25,5,gamma:2,1",
  ],
)
def test_step_times_are_those_of_order_statistics(spec):
  latency, hosts = _hosts(spec)
  expected = theory.step_times(hosts)
  assert expected.shape == (N,)
  for k in KS:
    assert _simulated(latency, k) == pytest.approx(expected[k - 1], rel=0.01)


def test_exponential_ones_have_a_closed_form():
  _, hosts = _hosts("exponential:2")
  closed = [theory.exponential_step_time(2, k, N) for k in range(1, N + 1)]
  np.testing.assert_allclose(theory.step_times(hosts), closed, rtol=1e-6)


def test_recorded_times_too():
  latency = simulate.Empirical(np.random.default_rng(0).gamma(2, 1, 100))
  expected = theory.step_times([latency] * N)
  for k in KS:
    assert _simulated(latency, k) == pytest.approx(expected[k - 1], rel=0.01)


def test_pareto_has_a_closed_form_and_may_be_infinite():
  # E[k-th of n] = scale * n!/(n-k)! * G(n-k+1-1/a) / G(n+1-1/a).
  def closed(k, a):
    if (N - k + 1) * a <= 1:
      return math.inf
    return math.exp(
      math.lgamma(N + 1)
      - math.lgamma(N - k + 1)
      + math.lgamma(N - k + 1 - 1 / a)
      - math.lgamma(N + 1 - 1 / a)
    )

  for shape in (0.8, 1.5, 3):
    _, hosts = _hosts(f"pareto:1,{shape}")
    expected = [closed(k, shape) for k in range(1, N + 1)]
    np.testing.assert_allclose(theory.step_times(hosts), expected, rtol=1e-4)
  # All the slow hosts but one have a mean together.
  _, hosts = _hosts("slow-hosts:0.25,5,pareto:1,0.4")
  assert (
    np.isinf(theory.step_times(hosts)).tolist() == [False] * 14 + [True] * 2
  )


@pytest.mark.parametrize(
  ("spec", "noise"),
  [
    ("shifted-exponential:1,0.3", math.inf),
    ("pareto:1,1.5", math.inf),
    ("lognormal:0,0.6", math.inf),
    ("shifted-exponential:1,0.3", 8),
    ("bernoulli:1,10,0.1", math.inf),
  ],
)
def test_the_best_number_of_backups_is_that_of_theory(spec, noise):
  latency, hosts = _hosts(spec)
  progress = lambda k: k / (1 + k / noise)
  best = theory.best_replicas_to_aggregate(hosts, progress)
  rates = [
    progress(k) / _simulated(latency, k, steps=20_000) for k in range(1, N + 1)
  ]
  assert int(np.argmax(rates)) + 1 == best
  assert 1 < best < N
