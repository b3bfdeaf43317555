"""A fleet's numbers, and those that are refused."""

import math

import pytest

from optax_dist import simulate
from optax_dist.simulate import scale
from tests.simulate.scale.fleets import fleet


def test_a_group_fails_as_often_as_any_of_its_chips():
  some = fleet(24, 8, failure_rate=1e-3)
  assert some.groups == 3
  assert some.group_failure_rate == pytest.approx(8e-3)
  assert some.mean_time_between_failures == pytest.approx(1 / 24e-3)
  # All groups together fail as often as all chips.
  assert some.groups * some.group_failure_rate == pytest.approx(
    1 / some.mean_time_between_failures
  )
  assert fleet(failure_rate=0.0).mean_time_between_failures == math.inf


def test_an_exchange_is_between_the_groups_that_take_part():
  some = fleet(nbytes=1e6, network=simulate.Network(0.1, 1e6))
  assert some.exchange(1) == 0.0
  assert some.exchange(2) == pytest.approx(0.2 + 1.0)
  assert some.exchange(4) == pytest.approx(0.2 + 1.5)
  # By default the network takes no time.
  assert fleet(nbytes=1e12).exchange(16) == 0.0


@pytest.mark.parametrize(
  ("name", "value", "words"),
  [
    ("chips", 0, "chips must be a positive integer, got 0"),
    ("chips", 64.0, "chips must be a positive integer, got 64.0"),
    ("chips", True, "chips must be a positive integer, got True"),
    ("chips", 10, "a multiple of chips_per_group, got 10 and 4"),
    ("chips_per_group", -4, "chips_per_group must be a positive integer"),
    *(
      (name, value, f"{name} must be a finite number of at least 0, got")
      for name in (
        *("failure_rate", "repair", "detect", "restart", "save", "restore"),
        *("reshard", "catch_up", "nbytes"),
      )
      for value in (-1e-9, math.inf, math.nan, "1", None)
    ),
    (
      "step",
      simulate.parse_latency("pareto:1,0.9"),
      "step must be a latency with a finite mean, got pareto:1,0.9",
    ),
    ("step", 1.0, "step must be a latency with a finite mean, got 1.0"),
  ],
)
def test_numbers_out_of_range_are_refused(name, value, words):
  told = {
    "chips": 64,
    "chips_per_group": 4,
    "step": simulate.parse_latency("constant:1"),
    "failure_rate": 0.0,
    "repair": 0.0,
  }
  scale.Fleet(**told)
  with pytest.raises(ValueError, match=words):
    scale.Fleet(**told | {name: value})
