"""Latencies as text; bad ones are refused with what is good."""

import pytest
from latency_specs import SPECS

from optax_dist import simulate


@pytest.mark.parametrize("spec", SPECS)
def test_a_latency_says_how_to_make_it(spec):
  assert str(simulate.parse_latency(spec)) == spec


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
    simulate.parse_latency(text)
