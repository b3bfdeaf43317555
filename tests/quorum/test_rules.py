"""Examples of the default rules; test_rules_properties.py states what always holds."""

import pickle

import pytest

from optax_dist import quorum
from optax_dist.quorum import Reason


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


def reason(decisions):
  assert isinstance(decisions[0], quorum.Drop), decisions
  return decisions[0].reason


@pytest.mark.parametrize(
  ("event", "expected"),
  [
    (quorum.Arrive(0, 1), Reason.STALE),
    (quorum.Arrive(0, 3), Reason.FUTURE),
    (quorum.Arrive(0, 2, finite=False), Reason.NON_FINITE),
    (quorum.Arrive(0, 2, incarnation=7), Reason.OTHER_INCARNATION),
    (quorum.Arrive(0, 2, count=2), Reason.OVER_QUOTA),
    (quorum.Arrive(9, 2), Reason.UNKNOWN_REPLICA),
  ],
)
def test_what_does_not_count_is_dropped_with_a_reason(event, expected):
  state = started(2, 2, global_step=2)
  state, decisions = run(state, event)
  assert reason(decisions) == expected
  # A dropped replica continues at once; old incarnations get nothing.
  told = expected not in (Reason.OTHER_INCARNATION, Reason.UNKNOWN_REPLICA)
  assert decisions[1:] == ((quorum.Token(0, 2),) if told else ())
  ledger = quorum.ledger(state)
  assert (ledger.arrived, ledger.inside) == (event.count, 0)
  assert ledger.dropped == {expected: event.count}


def test_a_dead_predecessors_step_is_refused():
  state = started(2, 2, max_staleness=5)
  state, _ = run(state, quorum.Arrive(0, 0), quorum.Arrive(1, 0))
  state, _ = run(state, quorum.Lost(0), quorum.Join(0, incarnation=1))
  # Late enough to be allowed, but this incarnation was never given step 0.
  _, decisions = run(state, quorum.Arrive(0, 0, incarnation=1))
  assert reason(decisions) == Reason.OTHER_INCARNATION
  _, decisions = run(state, quorum.Arrive(0, 1, incarnation=0))
  assert reason(decisions) == Reason.OTHER_INCARNATION
  _, decisions = run(state, quorum.Join(0, incarnation=1))
  assert decisions == (quorum.Refuse(0, Reason.OTHER_INCARNATION),)


def test_late_gradients_have_a_weight_by_their_staleness():
  state = started(
    2, 3, max_staleness=2, weight=quorum.inverse_staleness, two_phase=False
  )
  state, _ = run(state, *(quorum.Arrive(r, s) for s in (0, 1) for r in (0, 1)))
  state, decisions = run(state, quorum.Arrive(2, 0), quorum.Arrive(0, 2))
  (commit,) = [d for d in decisions if isinstance(d, quorum.Commit)]
  assert [(m.replica, m.staleness, m.weight) for m in commit.members] == [
    (0, 0, 1.0),
    (2, 2, 0.5),
  ]


def test_two_phases_commit_once_all_members_are_done():
  state, decisions = run(
    started(2, 3, two_phase=True), quorum.Arrive(2, 0), quorum.Arrive(0, 0)
  )
  attempt = decisions[1]
  assert (attempt.step, attempt.attempt) == (0, 1)
  assert [c.replica for c in attempt.members] == [0, 2]
  assert quorum.missing(state).reporting == (0, 2)
  # One that comes during the attempt waits, and is stale after it.
  state, decisions = run(state, quorum.Arrive(1, 0))
  assert kinds(decisions) == ["Accept", "Wait"]
  state, decisions = run(state, quorum.Done(0, 0, 1), quorum.Done(0, 0, 1))
  assert decisions == ()
  state, decisions = run(state, quorum.Done(2, 0, 1))
  assert kinds(decisions) == ["Commit", "Drop", "Token", "Token", "Token"]
  assert state.step == 1
  # A late report on a past attempt changes nothing.
  assert run(state, quorum.Done(2, 0, 1)) == (state, ())


def test_a_failed_attempt_drops_whose_gradient_failed_and_who_was_lost():
  state = started(3, 3, two_phase=True)
  state, _ = run(state, *(quorum.Arrive(replica, 0) for replica in range(3)))
  # It has done its part, so the attempt goes on without it.
  state, _ = run(state, quorum.Done(2, 0, 1), quorum.Lost(2))
  _, decisions = run(state, quorum.Failed(0, 0, 1, failed_replica=1))
  drops = [d for d in decisions if isinstance(d, quorum.Drop)]
  found = {drop.replica: drop.reason for drop in drops}
  assert found == {1: Reason.FAILED, 2: Reason.LOST}


def test_more_gradients_than_replicas_are_shared_out():
  state = quorum.init(5, 2, two_phase=False)
  # The first one's share is not larger because others are yet to come.
  for replica in range(2):
    state, decisions = run(state, quorum.Join(replica))
    assert decisions == (quorum.Token(replica, 0, count=3),)
  state, decisions = run(
    state, quorum.Arrive(0, 0, count=3), quorum.Arrive(1, 0, count=2)
  )
  assert [m.count for m in decisions[1].members] == [3, 2]
  assert state.step == 1


def test_a_loss_below_the_quorum_names_who_is_missing():
  state, decisions = run(
    started(3, 3), quorum.Arrive(0, 0), quorum.Lost(2), quorum.Lost(1)
  )
  (told,) = decisions
  assert (told.have, told.needed, told.missing) == (1, 3, (1, 2))
  assert not told.final
  assert "the step waits until they have joined again" in str(told)
  # A replica that comes back continues where the others are.
  state, _ = run(state, quorum.Join(1), quorum.Join(2), quorum.Arrive(1, 0))
  assert run(state, quorum.Arrive(2, 0))[0].step == 1


def test_leaving_for_good_raises_or_lowers():
  state, decisions = run(started(2, 2), quorum.Arrive(0, 0), quorum.Leave(1))
  (told,) = decisions
  assert told.final
  assert told.missing == (1,)
  assert "lower_on_leave=True" in str(told)
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


def test_a_window_is_open_until_it_is_closed():
  state, decisions = run(
    started(2, 3, window=True), quorum.Arrive(0, 0), quorum.Arrive(1, 0)
  )
  assert (state.step, state.gathered) == (0, 2)
  state, decisions = run(state, quorum.Close(0))
  assert [m.replica for m in decisions[0].members] == [0, 1]
  # It was that step's window; the next one has its own.
  state, _ = run(state, quorum.Arrive(0, 1), quorum.Arrive(1, 1))
  assert state.step == 1
  assert run(state, quorum.Close(0)) == (state, ())
  assert run(state, quorum.Close(1))[0].step == 2


def test_finished_is_a_state_and_no_error():
  state, decisions = run(started(2, 2), quorum.Arrive(0, 0), quorum.Finish())
  assert decisions == (
    quorum.Drop(0, 0, Reason.FINISHED),
    quorum.Finished(0),
  )
  for event in (quorum.Arrive(1, 0), quorum.Join(1), quorum.Join("new")):
    after, decisions = run(state, event)
    assert decisions[-1] == quorum.Finished(0)
    assert after.finished
  for event in (quorum.Finish(), quorum.Leave(0), quorum.Lost(1)):
    assert run(state, event) == (state, ())


def test_when_all_have_left_the_run_is_finished():
  state, decisions = run(started(1, 2), quorum.Leave(0), quorum.Leave(1))
  assert decisions == (quorum.Finished(0),)
  assert state.finished


def test_states_are_values_to_be_kept_and_sent():
  state, _ = run(started(2, 3, two_phase=True), quorum.Arrive(0, 0))
  copy = pickle.loads(pickle.dumps(state))
  assert copy == state
  assert run(copy, quorum.Arrive(1, 0)) == run(state, quorum.Arrive(1, 0))


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_a_count_below_one_is_no_event(count):
  with pytest.raises(ValueError, match="count must be a positive integer"):
    run(started(1, 1), quorum.Arrive(0, 0, count=count))
