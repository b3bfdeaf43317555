"""Every strategy at scale: sums, limits, and what distinguishes them."""

import pytest
from scipy import stats

from optax_dist import simulate
from optax_dist.simulate import scale
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


def test_backups_stand_still_as_often_as_too_few_are_there():
  # A group is there 100 s of 125: how many are is binomial.
  some = fleet(repair=20.0, restart=3.0, catch_up=2.0)
  found = scale.simulate_fleet(scale.backup_groups(13), some, seconds=400_000.0)
  there = stats.binom(16, 0.8)
  working = sum(there.pmf(n) * 13 / 16 for n in range(13, 17))
  assert found.goodput == pytest.approx(working, rel=0.02)


def test_a_group_that_is_out_is_idle_and_then_recovers():
  some = fleet(repair=20.0, restart=3.0, catch_up=2.0)
  shares = scale.simulate_fleet(
    scale.replica_groups(), some, seconds=100_000.0
  ).shares()
  assert shares["idle"] == pytest.approx(20 / 125, rel=0.05)
  assert shares["recovery"] == pytest.approx(5 / 125, rel=0.05)
  # Half a step goes with each failure.
  assert shares["dropped"] == pytest.approx(0.5 / 125, rel=0.1)


def test_a_longer_period_waits_less_and_loses_more():
  some = fleet(
    latency="exponential:1", nbytes=1.0, network=simulate.Network(0.5)
  )
  short, long = (
    scale.simulate_fleet(scale.diloco(period), some, seconds=20_000.0)
    for period in (1, 50)
  )
  for category in ("waiting", "exchanging"):
    assert long.share(category) < short.share(category)
  assert long.share("dropped") > 5 * short.share("dropped")
  groups = scale.simulate_fleet(scale.replica_groups(), some, seconds=20_000.0)
  assert short.share("exchanging") == pytest.approx(
    groups.share("exchanging"), rel=0.02
  )


def test_learners_that_are_decoupled_wait_for_nobody():
  some = fleet(
    latency="exponential:1",
    detect=5.0,
    nbytes=1.0,
    network=simulate.Network(0.5),
  )
  apart, together = (
    scale.simulate_fleet(make(10), some, seconds=20_000.0)
    for make in (scale.decoupled_diloco, scale.diloco)
  )
  assert apart.seconds["waiting"] == apart.seconds["exchanging"] == 0.0
  assert together.seconds["waiting"] > 0
  assert apart.goodput > together.goodput


def test_elastic_restart_goes_on_where_one_program_waits():
  some = fleet(
    failure_rate=1e-5, repair=2000.0, restart=5.0, restore=5.0, save=1.0
  )
  one, elastic = (
    scale.simulate_fleet(strategy, some).goodput
    for strategy in (scale.one_program(), scale.elastic_restart())
  )
  assert elastic > 1.2 * one


def test_a_million_chips():
  large = fleet(
    1_000_000, 100, "lognormal:0,0.1", failure_rate=1e-8, repair=600.0
  )
  goodputs = [
    scale.simulate_fleet(strategy, large).goodput
    for strategy in (scale.one_program(), scale.replica_groups())
  ]
  assert goodputs[0] < goodputs[1] < 1


def test_numbers_out_of_range_are_refused():
  with pytest.raises(ValueError, match="multiple of chips_per_group"):
    fleet(10, 4)
  with pytest.raises(ValueError, match="repair must be"):
    fleet(repair=-1.0)
  with pytest.raises(ValueError, match="finite mean"):
    fleet(latency="pareto:1,0.9")
  with pytest.raises(ValueError, match="bandwidth"):
    simulate.Network(0.0, 0.0)
  with pytest.raises(ValueError, match="number of groups"):
    scale.simulate_fleet(scale.backup_groups(17), fleet())
  for make in (scale.backup_groups, scale.diloco, scale.decoupled_diloco):
    with pytest.raises(ValueError, match="positive integer"):
      make(0)
  with pytest.raises(ValueError, match="seconds"):
    scale.simulate_fleet(scale.diloco(2), fleet(), seconds=0.0)
