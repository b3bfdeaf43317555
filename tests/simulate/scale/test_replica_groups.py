"""Replica groups: what a failure costs the others and its group."""

import pytest

from optax_dist.simulate import scale
from tests.simulate.scale.draws import Draws
from tests.simulate.scale.fleets import fleet


def test_a_group_that_is_out_is_idle_and_then_recovers():
  some = fleet(repair=20.0, restart=3.0, catch_up=2.0)
  shares = scale.simulate_fleet(
    scale.replica_groups(), some, seconds=100_000.0
  ).shares()
  assert shares["idle"] == pytest.approx(20 / 125, rel=0.05)
  assert shares["recovery"] == pytest.approx(5 / 125, rel=0.05)
  # Half a step goes with each failure.
  assert shares["dropped"] == pytest.approx(0.5 / 125, rel=0.1)


def test_a_failure_stops_the_others_until_it_is_detected():
  some = fleet(4, 1, repair=10.0, detect=2.0, restart=3.0, catch_up=1.0)
  draws = Draws([5.0], shares=[0.75])
  found = scale.replica_groups()(some, 30.0, draws).seconds
  # One is out from 5 s to 19 s; the three stand for 2 s.
  assert found["waiting"] == 3 * 2.0
  assert found["dropped"] == 0.75
  assert found["idle"] == 10.0
  assert found["recovery"] == 4.0
  assert found["useful"] == 4 * 5 + 3 * 12 + 4 * 11 - 0.75
