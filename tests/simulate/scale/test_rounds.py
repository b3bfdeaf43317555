"""Rounds with failures that a test has chosen, counted by hand."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist import simulate
from optax_dist.simulate.scale import arrivals, rounds
from tests.simulate.scale.draws import Draws
from tests.simulate.scale.fleets import fleet

USEFUL = rounds.Round(1.0)


def spent(some, seconds, draws, round_of=lambda n: USEFUL, **options):
  options = {
    "loss_of": lambda n, this: rounds.Loss(0.0, 0.0),
    "come_back": 5.0,
  } | options
  found = rounds.run(some, seconds, draws, round_of, **options)
  return {name: part for name, part in found.seconds.items() if part}


def test_a_failed_group_is_idle_until_repaired_and_recovers_until_back():
  # Four groups of one chip; one of them is out from 3 s to 18 s.
  some = fleet(4, 1, repair=10.0)
  assert spent(some, 30.0, Draws([3.0])) == {
    "useful": 4 * 3.0 + 3 * 15.0 + 4 * 12.0,
    "idle": 10.0,
    "recovery": 5.0,
  }


def test_the_time_of_a_group_is_that_of_its_chips():
  one, many = (
    spent(fleet(4 * per, per), 30.0, Draws([3.0])) for per in (1, 25)
  )
  assert many == {name: 25 * part for name, part in one.items()}


def test_several_are_out_at_once_and_come_back_in_turn():
  some = fleet(3, 1, repair=10.0)
  # At 2 s, and at 2 + 4 = 6 s: back at 17 s and at 21 s.
  found = spent(some, 30.0, Draws([2.0, 4.0]))
  assert found["useful"] == 3 * 2 + 2 * 4 + 1 * 11 + 2 * 4 + 3 * 9
  assert (found["idle"], found["recovery"]) == (20.0, 10.0)


def test_when_all_are_out_nobody_works_and_nobody_fails():
  some = fleet(2, 1, repair=10.0)
  draws = Draws([1.0, 1.0])
  found = spent(some, 40.0, draws, come_back=0.0)
  assert found == {"useful": 2 * 1.0 + 1.0 + 1.0 + 2 * 28.0, "idle": 20.0}
  # The time to a failure is of the groups that run.
  assert set(draws.scales) == {1 / (2 * 0.0025), 1 / 0.0025}


def test_a_failure_loses_its_share_of_a_round_and_stops_the_others():
  some = fleet(4, 1, repair=100.0)
  this = rounds.Round(2.0, waiting=1.0, exchanging=1.0)
  seen = []

  def loss_of(n, round_):
    seen.append((n, round_))
    return rounds.Loss(0.25, 6.0)

  found = spent(
    some, 20.0, Draws([8.0]), lambda n: this, loss_of=loss_of, come_back=0.0
  )
  assert seen == [(4, this)]
  # 8 s of four and 6 s of three in rounds; the three stand still for 6 s.
  rounds_ = (4 * 8 + 3 * 6) / 4.0
  assert found == {
    "useful": pytest.approx(2 * rounds_ - 0.5),
    "waiting": pytest.approx(rounds_ + 3 * 6),
    "exchanging": pytest.approx(rounds_),
    "dropped": pytest.approx(0.5),
    "idle": pytest.approx(12.0),
  }


def test_two_failures_in_a_row_stop_the_others_for_the_longer_time():
  some = fleet(3, 1, repair=100.0)
  stalls = [6.0, 3.0]
  found = spent(
    some,
    20.0,
    Draws([1.0, 1.0]),
    loss_of=lambda n, this: rounds.Loss(0.0, stalls.pop(0)),
  )
  # Two stand for 1 s, and then one for the other 5 s.
  assert found["waiting"] == 2 * 1.0 + 1 * 5.0


def test_no_more_is_lost_than_was_useful():
  some = fleet(2, 1, repair=100.0)
  found = spent(
    some,
    4.0,
    Draws([0.25]),
    lambda n: rounds.Round(10.0),
    loss_of=lambda n, this: rounds.Loss(1.0, 0.0),
  )
  assert found["dropped"] == 0.5
  assert found["useful"] == 3.75


@given(
  st.integers(1, 5),
  st.floats(0.5, 40.0),
  st.floats(0.0, 30.0),
  st.floats(0.0, 9.0),
  st.floats(0.0, 9.0),
  st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_all_time_is_spent_whatever_fails(
  groups, between, repair, stall, back, seed
):
  some = fleet(groups, 1, failure_rate=1 / between, repair=repair)
  rng = np.random.default_rng(seed)
  found = rounds.run(
    some,
    100.0,
    rng,
    lambda n: rounds.Round(1.0, 0.5, 0.25, 0.125),
    lambda n, this: rounds.Loss(rng.random(), stall),
    back,
  )
  assert found.total == pytest.approx(100.0 * groups)
  assert min(found.seconds.values()) >= -1e-9


def test_a_round_of_all_lasts_as_long_as_its_slowest():
  some = fleet(
    latency="exponential:2", nbytes=4.0, network=simulate.Network(0.5, 1.0)
  )
  round_of = functools.partial(
    rounds.of_all, some, arrivals.arrivals(some.step)
  )
  this = round_of(4)
  last = 2.0 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
  assert this.useful == 2.0
  assert this.waiting == pytest.approx(last - 2.0, rel=1e-3)
  # Half a second twice, and 3 / 4 of the bytes twice.
  assert this.exchanging == pytest.approx(1.0 + 6.0)
  assert this.seconds == pytest.approx(last + 7.0, rel=1e-3)
  # One alone waits for nobody, and sends nothing.
  assert round_of(1) == (2.0, pytest.approx(0.0, abs=5e-3), 0.0, 0.0, 0.0)
