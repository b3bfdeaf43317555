"""Hosts that differ."""

import numpy as np
import pytest

from optax_dist import simulate


def test_slow_hosts_stay_slow():
  made = simulate.parse_latency("slow-hosts:0.3,10,constant:1")
  hosts = made.hosts(10, np.random.default_rng(0))
  values = [set(h.draw(np.random.default_rng(1), 5)) for h in hosts]
  assert sorted(map(min, values)) == [1.0] * 7 + [10.0] * 3
  assert all(len(of_one) == 1 for of_one in values)


def test_recorded_hosts_repeat():
  made = simulate.PerHost(
    [simulate.parse_latency("constant:1"), simulate.parse_latency("constant:2")]
  )
  hosts = made.hosts(5, np.random.default_rng(0))
  assert [host.mean for host in hosts] == [1, 2, 1, 2, 1]


def test_there_must_be_a_host():
  with pytest.raises(ValueError, match="at least one latency"):
    simulate.PerHost([])
