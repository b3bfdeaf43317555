"""Latencies: draws agree with mean and survival; bad ones are refused."""

import math

import numpy as np
import pytest
from latency_specs import SPECS

from optax_dist import simulate
from optax_dist.simulate.latency import hosts as host_latencies


def _all():
  made = [simulate.parse_latency(spec) for spec in SPECS]
  made.append(simulate.Empirical([0.5, 1.0, 1.0, 4.0]))
  made.append(simulate.PerHost(made[:2]))
  made.append(host_latencies.Scaled(made[2], 3.0))
  return made


@pytest.mark.parametrize("made", _all(), ids=str)
def test_draws_have_the_mean_and_the_survival(made):
  values = made.draw(np.random.default_rng(0), 200_000)
  assert values.shape == (200_000,)
  assert values.dtype == np.float64
  assert (values > 0).all()
  error = values.std() / math.sqrt(values.size)
  assert abs(values.mean() - made.mean) <= 4 * error + 1e-12
  for t in np.quantile(values, [0.1, 0.5, 0.9, 0.999]):
    share = (values > t).mean()
    assert abs(share - made.survival(t)) <= 4 * math.sqrt(0.25 / values.size)
  assert made.survival(0.0) == 1.0


def test_heavy_tails_have_no_mean():
  assert simulate.parse_latency("pareto:1,1").mean == math.inf


def test_recorded_times_must_be_times():
  with pytest.raises(ValueError, match="got none"):
    simulate.Empirical([])
  for bad in ([1.0, 0.0], [1.0, math.nan], [math.inf]):
    with pytest.raises(ValueError, match="finite and above 0"):
      simulate.Empirical(bad)
