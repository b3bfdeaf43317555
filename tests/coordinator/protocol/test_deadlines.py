"""All waits increase in one order, whatever the options are."""

import itertools

import pytest

from optax_dist.coordinator.options import Options
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.transport import interface


@pytest.mark.parametrize(
  ("timeout", "attempt", "leader"),
  list(
    itertools.product(
      (0.01, 1.0, 16.0, 300.0, 1e9),
      (None, 0.01, 10.0, 1e9),
      (None, 0.05, 5.0, 1e9),
    )
  ),
)
def test_who_knows_more_speaks_first(timeout, attempt, leader):
  """Members name who is missing, then the leader ends the run."""
  found = deadlines.of(timeout, attempt, leader)
  order = (
    found.patience,
    found.mean,
    found.attempt,
    found.timeout,
    found.replica,
  )
  assert order == tuple(sorted(set(order)))
  assert found.silence < found.timeout
  # The leader may fail at the very end, and be replaced.
  assert found.replica >= timeout + 2 * found.pace


def test_options_decide_the_patience_and_the_silence():
  assert deadlines.of(300.0, attempt_timeout=4.0).patience == 4.0
  found = deadlines.of(300.0, leader_timeout=2.0)
  assert (found.pace, found.silence) == (2.0, 2.0)
  assert Options(leader_timeout=2.0).silence == interface.fixed(2.0)
  assert Options().silence == deadlines.silence(300.0)
  assert deadlines.of(300.0).silence == deadlines.silence(300.0).ceiling


def test_short_runs_have_short_rules():
  for rule in (deadlines.silence(10.0), deadlines.steps(10.0)):
    assert rule.floor <= rule.first <= rule.ceiling <= 6.0


def test_a_silent_member_has_no_less_time_than_a_silent_leader():
  found = deadlines.of(20.0)
  assert found.silence >= found.pace
