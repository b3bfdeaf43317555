"""Examples of the default rules; test_rules_properties.py states what always holds."""

import pytest

from optax_dist import quorum


def run(state, *events):
  """Applies events; returns the state and the last one's decisions."""
  decisions = ()
  for event in events:
    state, decisions = quorum.step(state, event)
  return state, decisions


def started(k, n, **options):
  """A run in which all replicas have joined; one phase unless asked."""
  state = quorum.init(k, n, **{"two_phase": False, **options})
  return run(state, *(quorum.Join(replica) for replica in range(n)))[0]


def kinds(decisions):
  return [type(decision).__name__ for decision in decisions]


def test_loss_below_the_quorum_names_the_missing_replicas():
  state, decisions = run(
    started(3, 3), quorum.Arrive(0, 0), quorum.Lost(2), quorum.Lost(1)
  )
  (decision,) = decisions
  assert (decision.have, decision.needed, decision.missing) == (1, 3, (1, 2))
  assert not decision.final
  assert "the step waits until they have joined again" in str(decision)
  # A replica that comes back continues where the others are.
  state, _ = run(state, quorum.Join(1), quorum.Join(2), quorum.Arrive(1, 0))
  assert run(state, quorum.Arrive(2, 0))[0].step == 1


def test_final_departure_raises_or_lowers_the_quorum():
  state, decisions = run(started(2, 2), quorum.Arrive(0, 0), quorum.Leave(1))
  (decision,) = decisions
  assert decision.final
  assert decision.missing == (1,)
  assert "lower_on_leave=True" in str(decision)
  assert state.step == 0
  state, decisions = run(
    started(2, 2, lower_on_leave=True), quorum.Arrive(0, 0), quorum.Leave(1)
  )
  assert kinds(decisions) == ["Commit", "Token"]
  # A crash is not a leave: the quorum stays.
  state, decisions = run(
    started(2, 2, lower_on_leave=True), quorum.Arrive(0, 0), quorum.Lost(1)
  )
  assert kinds(decisions) == ["CannotProceed"]


def test_a_sum_of_an_older_step_is_replaced_by_a_larger_one():
  """With more gradients than replicas: sums of two steps can't be mixed."""
  first = (quorum.Arrive(replica, 0, count=2) for replica in range(3))
  state, _ = run(started(4, 3, max_staleness=1), *first, quorum.Lost(0))
  assert state.step == 1  # By the first two; the third one's is a step older.
  _, decisions = run(state, quorum.Arrive(1, 1, count=1))
  tokens = [d for d in decisions if isinstance(d, quorum.Token)]
  assert {token.replica: token.count for token in tokens} == {1: 1, 2: 3}


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_count_below_one_is_refused(count):
  with pytest.raises(ValueError, match="count must be a positive integer"):
    run(started(1, 1), quorum.Arrive(0, 0, count=count))
