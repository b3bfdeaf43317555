"""Latencies: draws agree with mean and survival; bad ones are refused."""

import math

import numpy as np
import pytest

from optax_dist.simulate import latency

SPECS = [
  "constant:2",
  "exponential:0.5",
  "shifted-exponential:1,0.5",
  "lognormal:-1,0.5",
  "pareto:1,3.5",
  "gamma:2,0.5",
  "bernoulli:1,10,0.05",
  "slow-hosts:0.25,4,exponential:1",
]


def _all():
  made = [latency.parse(spec) for spec in SPECS]
  made.append(latency.Empirical([0.5, 1.0, 1.0, 4.0]))
  made.append(latency.PerHost(made[:2]))
  made.append(latency.Scaled(made[2], 3.0))
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


@pytest.mark.parametrize("spec", SPECS)
def test_a_latency_says_how_to_make_it(spec):
  assert str(latency.parse(spec)) == spec


def test_heavy_tails_have_no_mean():
  assert latency.parse("pareto:1,1").mean == math.inf


def test_slow_hosts_stay_slow():
  made = latency.parse("slow-hosts:0.3,10,constant:1")
  hosts = made.hosts(10, np.random.default_rng(0))
  values = [set(h.draw(np.random.default_rng(1), 5)) for h in hosts]
  assert sorted(map(min, values)) == [1.0] * 7 + [10.0] * 3
  assert all(len(of_one) == 1 for of_one in values)


def test_recorded_hosts_repeat():
  made = latency.PerHost([latency.parse("constant:1"), latency.parse(SPECS[0])])
  hosts = made.hosts(5, np.random.default_rng(0))
  assert [host.mean for host in hosts] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "a latency is one of constant:t, exponential:mean"),
    ("weibull:1", "got 'weibull'"),
    ("exponential", "takes 1 numbers, exponential:mean; got 0"),
    ("pareto:1", "takes 2 numbers, pareto:scale,shape; got 1"),
    ("exponential:0", "mean of exponential must be a finite number above 0"),
    ("exponential:nan", "mean of exponential must be a finite number above 0"),
    ("lognormal:inf,1", "mu of lognormal must be a finite number, got inf"),
    ("shifted-exponential:-1,1", "shift of .* of at least 0, got -1"),
    ("bernoulli:1,2,1.5", "p of bernoulli must be at most 1, got 1.5"),
    ("gamma:1,two", "parameters of a latency are numbers, got 'two'"),
    ("slow-hosts:0.1,3", "slow-hosts takes slow-hosts:share,factor,NAME"),
    ("slow-hosts:2,3,constant:1", "share of slow-hosts must be from 0 to 1"),
    ("slow-hosts:0.1,-3,constant:1", "factor of slow-hosts must be a finite"),
  ],
)
def test_a_bad_latency_says_what_is_good(text, said):
  with pytest.raises(ValueError, match=said):
    latency.parse(text)


def test_recorded_times_must_be_times():
  with pytest.raises(ValueError, match="got none"):
    latency.Empirical([])
  for bad in ([1.0, 0.0], [1.0, math.nan], [math.inf]):
    with pytest.raises(ValueError, match="finite and above 0"):
      latency.Empirical(bad)
  with pytest.raises(ValueError, match="at least one latency"):
    latency.PerHost([])
