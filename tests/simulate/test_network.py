"""The time of an exchange over a network."""

import pytest

from optax_dist.simulate import Network
from optax_dist.simulate.network import moved


def test_each_sends_and_gets_all_but_its_own_part_twice():
  network = Network(latency=0.5, bandwidth=4.0)
  assert moved(8.0, 4) == 12.0
  assert network.all_reduce(8.0, 4) == 2 * 0.5 + 12.0 / 4
  assert network.all_reduce(8.0, 1) == 0.0


def test_numbers_out_of_range_are_refused():
  with pytest.raises(ValueError, match=r"latency must be .*, got -1"):
    Network(latency=-1)
  with pytest.raises(ValueError, match="bandwidth must be above 0, got 0"):
    Network(bandwidth=0)
