"""Order statistics on a grid against closed forms and exact sums."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate import theory
from optax_dist.simulate.scale.arrivals import Arrivals


@pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 8), (8, 8), (990, 1000)])
def test_exponential(k, n):
  found = Arrivals(simulate.parse_latency("exponential:2")).expected(k, n)
  exact = theory.exponential_step_time(2.0, k, n)
  assert found == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
  "spec",
  [
    "gamma:4,0.25",
    "lognormal:0,0.6",
    "pareto:1,2.5",
    "bernoulli:1,10,0.02",
    "constant:3",
    "slow-hosts:0.25,3,gamma:4,0.25",
  ],
)
def test_quadrature(spec):
  latency = simulate.parse_latency(spec)
  hosts = latency.hosts(16, np.random.default_rng(0))
  exact = theory.step_times(hosts)
  arrivals = Arrivals(latency)
  # With hosts that differ the grid draws each from all kinds.
  tolerance = 0.07 if spec.startswith("slow") else 3e-3
  for k in (1, 8, 12, 16):
    assert arrivals.expected(k, 16) == pytest.approx(
      exact[k - 1], rel=tolerance
    )
  assert arrivals.mean == pytest.approx(latency.mean)


def test_a_sum_of_steps_is_its_convolution():
  # 40 steps of gamma(2, 0.5) are one of gamma(80, 0.5).
  many = Arrivals(simulate.parse_latency("gamma:2,0.5"), 40)
  one = Arrivals(simulate.parse_latency("gamma:80,0.5"))
  assert many.mean == pytest.approx(one.mean)
  for k, n in ((1, 10), (10, 10), (1000, 1000)):
    assert many.expected(k, n) == pytest.approx(one.expected(k, n), rel=2e-3)


def test_constant_steps_add_up_exactly():
  arrivals = Arrivals(simulate.parse_latency("constant:0.5"), 7)
  assert arrivals.expected(5, 9) == 3.5


@pytest.mark.parametrize("spec", ["exponential:1", "bernoulli:1,10,0.1"])
def test_the_mean_of_the_first(spec):
  latency = simulate.parse_latency(spec)
  drawn = np.sort(
    latency.draw(np.random.default_rng(1), 400_000).reshape(-1, 10), axis=1
  )
  arrivals = Arrivals(latency)
  for k in (1, 7, 10):
    assert arrivals.mean_of_first(k, 10) == pytest.approx(
      drawn[:, :k].mean(), rel=0.02
    )
