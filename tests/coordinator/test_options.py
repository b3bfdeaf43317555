"""Options: which deadlines follow what is seen, and which are given."""

import pytest

from optax_dist.coordinator.options import Options
from optax_dist.coordinator.protocol import arrivals


def test_by_default_deadlines_follow_what_is_seen():
  told = Options()
  assert told.silence == arrivals.silence(300.0)
  assert told.attempts == arrivals.attempts(300.0)
  assert (told.leader_pace, told.attempt_pace) == (5.0, 10.0)


def test_a_number_that_is_given_wins():
  told = Options(leader_timeout=2.0, attempt_timeout=3.0)
  assert (told.silence, told.attempts) == (None, None)
  assert (told.leader_pace, told.attempt_pace) == (2.0, 3.0)
  assert Options(leader_timeout=2.0).attempts is not None


def test_no_pace_is_slower_than_the_run_may_stand_still():
  told = Options(timeout=1.0)
  assert (told.leader_pace, told.attempt_pace) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["timeout", "attempt_timeout"])
def test_what_can_not_be_is_refused_by_name(name):
  with pytest.raises(ValueError, match=name):
    Options(**{name: 0.0})
  with pytest.raises(ValueError, match="attempt_timeout must be at most"):
    Options(timeout=5.0, attempt_timeout=6.0)


@pytest.mark.parametrize("given", [-0.1, 1.5, float("nan")])
def test_error_feedback_is_a_decay(given):
  with pytest.raises(ValueError, match="error_feedback must be from 0 to 1"):
    Options(wire="top_k", error_feedback=given)


def test_error_feedback_needs_a_wire_that_leaves_something_out():
  assert Options(wire="int4", error_feedback=0.95).error_feedback == 0.95
  with pytest.raises(ValueError, match=r"wire='bfloat16' leaves out"):
    Options(wire="bfloat16", error_feedback=0.95)
