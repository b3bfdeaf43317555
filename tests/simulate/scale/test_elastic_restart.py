"""Elastic restarts with failures that a test has chosen, counted by hand."""

import pytest

from optax_dist import simulate
from optax_dist.simulate import scale
from tests.simulate.scale.draws import Draws
from tests.simulate.scale.fleets import fleet


def test_elastic_restart_goes_on_where_one_program_waits():
  some = fleet(
    failure_rate=1e-5, repair=2000.0, restart=5.0, restore=5.0, save=1.0
  )
  one, elastic = (
    scale.simulate_fleet(strategy, some).goodput
    for strategy in (scale.one_program(), scale.elastic_restart())
  )
  assert elastic > 1.2 * one


def spent(some, interval, seconds, failures):
  strategy = scale.elastic_restart(interval)
  found = strategy(some, seconds, Draws(failures)).seconds
  return {name: part for name, part in found.items() if part}


COSTS = {"detect": 1.0, "reshard": 2.0, "restart": 3.0, "restore": 4.0}


def test_a_failure_costs_the_work_since_the_last_checkpoint():
  some = fleet(4, 1, repair=1000.0, save=1.0, **COSTS)
  # Saved at 5 to 6 s and 11 to 12 s; fails at 15 s; goes on at 25 s with three.
  found = spent(some, 5.0, 40.0, [15.0])
  assert found == {
    "useful": 4 * 10.0 + 3 * (5 + 5 + 3),
    "dropped": 4 * 3.0,
    "recovery": 4 * 2.0 + 3 * 10.0 + 3 * 2.0,
    "idle": 25.0,
  }


def test_a_repaired_group_costs_a_checkpoint_and_a_restart():
  some = fleet(4, 1, repair=20.0, save=1.0, **COSTS)
  # Fails at 10 s, goes on at 20 s with three; at 30 s the fourth is back, they
  # save, and go on together at 36 s.
  found = spent(some, 100.0, 50.0, [10.0])
  assert found == {
    "useful": 3 * 10.0 + 4 * 14.0,
    "dropped": 4 * 10.0,
    "recovery": 3 * 10.0 + 4 * 6.0,
    "idle": 20.0,
  }


def test_a_failure_while_they_recover_begins_it_anew():
  some = fleet(4, 1, repair=1000.0, save=1.0, **COSTS)
  # After 4 of the 10 s another one fails.
  found = spent(some, 100.0, 50.0, [10.0, 4.0])
  assert found == {
    "useful": 2 * 26.0,
    "dropped": 4 * 10.0,
    "recovery": 3 * 4.0 + 2 * 10.0,
    "idle": 40.0 + 36.0,
  }


def test_when_all_are_out_the_first_that_is_back_goes_on():
  some = fleet(2, 1, repair=30.0, save=1.0, **COSTS)
  # At 10 s and at 12 s; at 40 s one is back, and recovers until 50 s. By then
  # the other one is back, too.
  found = spent(some, 100.0, 60.0, [10.0, 2.0])
  assert found == {
    "useful": 2 * 10.0,
    "dropped": 2 * 10.0,
    "recovery": 2.0 + 10.0,
    "idle": 30.0 + 38.0,
  }


def test_work_that_the_end_cuts_short_counts():
  some = fleet(4, 1, save=2.0, failure_rate=0.0)
  # 5 s of work, and 1 s of the 2 s of a checkpoint.
  assert spent(some, 5.0, 6.0, []) == {"useful": 20.0, "recovery": 4.0}


def test_a_step_waits_for_the_slowest_of_those_that_are_there():
  some = fleet(
    4,
    1,
    latency="exponential:1",
    failure_rate=0.0,
    network=simulate.Network(0.25),
  )
  found = scale.simulate_fleet(scale.elastic_restart(100.0), some).shares()
  step = 1 + 1 / 2 + 1 / 3 + 1 / 4 + 0.5
  assert found["useful"] == pytest.approx(1 / step, rel=1e-3)
  assert found["exchanging"] == pytest.approx(0.5 / step, rel=1e-3)
  assert found["waiting"] == pytest.approx(1 - 1.5 / step, rel=1e-2)
