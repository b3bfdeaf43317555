"""Every strategy on a fleet: sums and limits, and for how long it runs."""

import math

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate import scale
from optax_dist.simulate.scale import run
from tests.simulate.scale.fleets import fleet

ALL = [
  scale.one_program(20.0),
  scale.elastic_restart(20.0),
  scale.backup_groups(14),
  scale.replica_groups(),
  scale.diloco(5),
  scale.decoupled_diloco(5),
]
NAMES = [strategy.name for strategy in ALL]


@pytest.mark.parametrize("strategy", ALL, ids=NAMES)
def test_all_time_is_accounted_for(strategy):
  busy = fleet(
    latency="gamma:4,0.25",
    detect=1.0,
    restart=2.0,
    save=0.5,
    restore=1.0,
    reshard=1.0,
    catch_up=2.0,
    nbytes=1e6,
    network=simulate.Network(0.01, 1e8),
  )
  found = scale.simulate_fleet(strategy, busy, seconds=5000.0)
  assert found.total == pytest.approx(64 * 5000.0, rel=1e-6)
  assert min(found.seconds.values()) >= 0
  assert 0 < found.goodput < 1
  assert found == scale.simulate_fleet(strategy, busy, seconds=5000.0)


@pytest.mark.parametrize("strategy", ALL[1:], ids=NAMES[1:])
def test_without_failures_and_stragglers_all_is_useful(strategy):
  calm = fleet(failure_rate=0.0)
  expected = 14 / 16 if strategy is ALL[2] else 1.0
  assert scale.simulate_fleet(strategy, calm).goodput == pytest.approx(expected)


def test_a_million_chips():
  large = fleet(
    1_000_000, 100, "lognormal:0,0.1", failure_rate=1e-8, repair=600.0
  )
  goodputs = [
    scale.simulate_fleet(strategy, large).goodput
    for strategy in (scale.one_program(), scale.replica_groups())
  ]
  assert goodputs[0] < goodputs[1] < 1


def test_the_seed_draws_the_failures():
  found = [
    scale.simulate_fleet(scale.replica_groups(), fleet(), seconds=900.0, seed=s)
    for s in (1, 1, 2)
  ]
  assert found[0] == found[1] != found[2]


class _Told:
  """A strategy that only notes what it is told."""

  name = "told"

  def __call__(self, fleet, seconds, rng):
    self.seconds = seconds
    self.drawn = rng.random()


def test_a_strategy_gets_the_seconds_and_a_generator_of_its_own():
  told = _Told()
  scale.simulate_fleet(told, fleet(), seconds=7.0, seed=5)
  assert told.seconds == 7.0
  assert told.drawn == np.random.default_rng(5).random()


def test_by_default_there_are_failures_enough():
  # A failure in 1 / (64 * 0.0025) = 6.25 s.
  assert run.duration(fleet(), None) == pytest.approx(2000 * 6.25)
  # Long repairs are to be over some times, too.
  slow = fleet(repair=1e6, detect=1.0, restart=2.0, restore=3.0)
  assert run.duration(slow, None) == pytest.approx(20 * (6.25 + 1e6 + 6.0))
  # Without failures it is a thousand steps.
  calm = fleet(failure_rate=0.0, latency="constant:0.5")
  assert run.duration(calm, None) == 500.0
  assert run.duration(calm, 3.0) == 3.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, "9"])
def test_no_time_is_refused(seconds):
  with pytest.raises(ValueError, match="seconds must be a number above 0"):
    scale.simulate_fleet(scale.replica_groups(), fleet(), seconds=seconds)
