"""Tests of the default rules: each fault that they fix, and each end."""

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


def test_a_fast_replica_does_not_fill_the_quorum():
  state, decisions = run(
    started(2, 3), quorum.Arrive(0, 0), quorum.Arrive(0, 0), quorum.Arrive(0, 0)
  )
  assert reason(decisions) == Reason.DUPLICATE
  assert decisions[1:] == (quorum.Wait(0, 0),)
  assert (state.step, state.gathered) == (0, 1)


def test_a_replica_counts_once_per_step_however_late():
  state, _ = run(
    started(1, 2, max_staleness=3), quorum.Arrive(0, 0), quorum.Arrive(1, 0)
  )
  state, decisions = run(state, quorum.Arrive(0, 0))
  assert reason(decisions) == Reason.DUPLICATE
  assert decisions[1:] == (quorum.Token(0, 2),)
  assert run(state, quorum.Arrive(0, 1))[0].step == 3


def test_no_round_is_wasted_on_initial_tokens():
  # TensorFlow's first tokens carry step 0 twice: SR-01 drops a whole round.
  state = started(2, 2)
  for at in range(3):
    state, decisions = run(state, quorum.Arrive(0, at), quorum.Arrive(1, at))
    assert decisions[-2:] == (quorum.Token(0, at + 1), quorum.Token(1, at + 1))
  assert quorum.ledger(state).dropped == {}


def test_a_fresh_replica_gets_the_present_step():
  state = started(1, 1)
  state, _ = run(state, quorum.Arrive(0, 0), quorum.Arrive(0, 1))
  state, decisions = run(state, quorum.Join("new"))
  assert decisions == (quorum.Token("new", 2),)


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


def test_a_restart_that_nobody_noticed_takes_the_old_gradient_out():
  state, decisions = run(started(2, 2), quorum.Arrive(0, 0), quorum.Join(0))
  assert kinds(decisions) == ["Drop", "Token"]
  assert reason(decisions) == Reason.LOST
  state, decisions = run(state, quorum.Arrive(1, 0), quorum.Arrive(0, 0))
  assert state.step == 1


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


@pytest.mark.parametrize("event", [quorum.Lost(0), quorum.Leave(0)])
def test_a_death_during_an_attempt_keeps_the_survivors_gradients(event):
  state = started(2, 3, two_phase=True)
  state, _ = run(state, quorum.Arrive(0, 0), quorum.Arrive(1, 0))
  state, _ = run(state, quorum.Done(1, 0, 1))
  state, decisions = run(state, event)
  assert decisions[0] == quorum.Abandon(0, 1, 0)
  assert (state.step, state.gathered) == (0, 1)
  # The next attempt is at the same step, with the survivor's gradient.
  state, decisions = run(state, quorum.Arrive(2, 0))
  assert [c.replica for c in decisions[1].members] == [1, 2]
  assert decisions[1].attempt == 2
  state, decisions = run(state, quorum.Done(1, 0, 2), quorum.Done(2, 0, 2))
  assert kinds(decisions)[0] == "Commit"


def test_a_death_after_done_does_not_undo_the_commit():
  state = started(2, 3, two_phase=True)
  state, _ = run(
    state, quorum.Arrive(0, 0), quorum.Arrive(1, 0), quorum.Done(0, 0, 1)
  )
  state, decisions = run(state, quorum.Lost(0))
  assert decisions == ()
  state, decisions = run(state, quorum.Done(1, 0, 1))
  assert kinds(decisions) == ["Commit", "Token"]
  assert [c.replica for c in decisions[0].members] == [0, 1]


def test_a_failed_part_leaves_only_the_failed_replica_out():
  state = started(2, 3, two_phase=True)
  state, _ = run(state, *(quorum.Arrive(r, 0) for r in range(3)))
  state, decisions = run(state, quorum.Failed(0, 0, 1, failed_replica=1))
  assert kinds(decisions) == ["Abandon", "Drop", "Token", "StartAttempt"]
  assert decisions[1:3] == (
    quorum.Drop(1, 0, Reason.FAILED),
    quorum.Token(1, 0),
  )
  assert [c.replica for c in decisions[3].members] == [0, 2]
  # Its part failed, not its gradient: it may try the same step again.
  _, decisions = run(state, quorum.Arrive(1, 0))
  assert kinds(decisions) == ["Accept", "Wait"]


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


def test_the_rest_is_asked_for_when_a_replica_is_lost():
  state = started(4, 2)
  state, _ = run(state, quorum.Arrive(0, 0, count=2))
  state, decisions = run(state, quorum.Lost(1))
  assert decisions == (quorum.Token(0, 0, count=2),)
  state, decisions = run(state, quorum.Arrive(0, 0, count=2))
  assert [m.count for m in decisions[1].members] == [4]


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


def test_one_that_never_came_can_be_given_up():
  state = quorum.init(2, replicas=["a", "b", "c"], total_num_replicas=3)
  state, _ = run(state, quorum.Join("a"))
  assert quorum.missing(state).absent == ("b", "c")
  state, decisions = run(state, quorum.Leave("b"), quorum.Leave("c"))
  assert decisions[0].final
  assert decisions[0].missing == ("b", "c")
  # Its first process may still come, whether it names its incarnation or not.
  state, decisions = run(state, quorum.Join("b", incarnation=0))
  assert decisions == (quorum.Token("b", 0),)
  assert run(state, quorum.Join("c"))[0].replicas["c"].incarnation == 0


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


def test_a_window_is_over_once_all_who_live_are_in():
  state, _ = run(started(1, 3, window=True), quorum.Arrive(0, 0))
  assert state.step == 0
  assert run(state, quorum.Arrive(1, 0), quorum.Arrive(2, 0))[0].step == 1
  # Or once the others are gone.
  assert run(state, quorum.Lost(1), quorum.Leave(2))[0].step == 1


def test_nothing_closes_before_the_quorum():
  state, _ = run(started(2, 3, window=True), quorum.Arrive(0, 0))
  assert run(state, quorum.Close(0)) == (state, ())
  state, decisions = run(state, quorum.Arrive(1, 0))
  assert "Commit" not in kinds(decisions)


def test_who_fails_after_the_window_is_not_waited_for():
  options = {"window": True, "two_phase": True}
  state, decisions = run(
    started(1, 3, **options),
    quorum.Arrive(0, 0),
    quorum.Arrive(1, 0),
    quorum.Close(0),
  )
  assert kinds(decisions) == ["StartAttempt"]
  state, decisions = run(state, quorum.Failed(0, 0, 1, 1))
  assert decisions[-1].members[0].replica == 0
  assert kinds(decisions)[-1] == "StartAttempt"


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


def test_a_finish_drops_what_is_in_an_attempt_and_what_is_not():
  state, decisions = run(
    started(2, 3, two_phase=True),
    quorum.Arrive(0, 0),
    quorum.Arrive(1, 0),
    quorum.Arrive(2, 0),
    quorum.Finish(),
  )
  assert decisions == (
    quorum.Drop(2, 0, Reason.FINISHED),
    quorum.Drop(0, 0, Reason.FINISHED),
    quorum.Drop(1, 0, Reason.FINISHED),
    quorum.Finished(0),
  )
  assert quorum.ledger(state).inside == 0


def test_a_restart_during_an_attempt_keeps_its_own_gradient():
  state, decisions = run(
    started(2, 2, two_phase=True, max_staleness=1),
    quorum.Arrive(0, 0),
    quorum.Arrive(1, 0),
    quorum.Done(0, 0, 1),
    quorum.Lost(0),
    quorum.Join(0),
    quorum.Arrive(0, 0),
    quorum.Done(1, 0, 1),
  )
  assert kinds(decisions) == ["Commit", "Token"]
  # What its first process gave is committed; the second one's is still in.
  assert decisions[1] == quorum.Token(1, 1)
  assert state.inside[0].staleness == 1


@pytest.mark.parametrize(
  ("event", "expected"),
  [(quorum.Lost(0), Reason.LOST), (quorum.Leave(0), Reason.LEFT)],
)
def test_a_departed_members_gradient_is_dropped_by_its_reason(event, expected):
  _, decisions = run(
    started(2, 3, two_phase=True),
    quorum.Arrive(0, 0),
    quorum.Arrive(1, 0),
    quorum.Done(0, 0, 1),
    event,
    quorum.Failed(1, 0, 1),
  )
  assert quorum.Drop(0, 0, expected) in decisions
  assert quorum.Drop(1, 0, Reason.FAILED) in decisions


def test_replicas_lost_during_an_attempt_are_missed_once_it_fails():
  state, decisions = run(
    started(2, 3, two_phase=True),
    quorum.Arrive(0, 0),
    quorum.Arrive(1, 0),
    quorum.Done(0, 0, 1),
    quorum.Lost(0),
    quorum.Lost(2),
  )
  assert decisions == ()
  state, decisions = run(state, quorum.Failed(1, 0, 1))
  assert kinds(decisions)[-1] == "CannotProceed"
  assert decisions[-1].missing == (0, 2)


def test_the_rest_of_a_sum_does_not_make_an_exact_step_too_large():
  _, decisions = run(
    started(6, 2, exact=True),
    quorum.Arrive(0, 0, count=3),
    quorum.Arrive(1, 0, count=2),
    quorum.Arrive(0, 0, count=3),
  )
  assert decisions == (
    quorum.Drop(0, 0, Reason.OVER_QUOTA, count=3),
    quorum.Token(0, 0, count=1),
  )


def test_when_all_have_left_the_run_is_finished():
  state, decisions = run(started(1, 2), quorum.Leave(0), quorum.Leave(1))
  assert decisions == (quorum.Finished(0),)
  assert state.finished


@pytest.mark.parametrize("other", [(), (quorum.Join(1), quorum.Lost(1))])
def test_a_run_goes_on_while_one_may_still_come(other):
  state, decisions = run(
    quorum.init(1, 2), *other, quorum.Join(0), quorum.Leave(0)
  )
  assert kinds(decisions) == (["CannotProceed"] if other else [])
  state, decisions = run(state, quorum.Join(1))
  assert decisions == (quorum.Token(1, 0),)


def test_two_optimizers_share_nothing():
  # TensorFlow's share one token queue and block each other (SR-TWO-OPT).
  one = two = started(2, 2)
  one, _ = run(one, quorum.Arrive(0, 0))
  two, _ = run(two, quorum.Arrive(1, 0))
  one, _ = run(one, quorum.Arrive(1, 0))
  two, _ = run(two, quorum.Arrive(0, 0))
  assert one.step == two.step == 1


def test_states_are_values_to_be_kept_and_sent():
  state, _ = run(started(2, 3, two_phase=True), quorum.Arrive(0, 0))
  copy = pickle.loads(pickle.dumps(state))
  assert copy == state
  assert run(copy, quorum.Arrive(1, 0)) == run(state, quorum.Arrive(1, 0))


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_a_count_below_one_is_no_event(count):
  with pytest.raises(ValueError, match="count must be a positive integer"):
    run(started(1, 1), quorum.Arrive(0, 0, count=count))


def test_a_failed_step_may_be_tried_again_and_the_one_before_it_not():
  state, _ = run(
    started(1, 1, two_phase=True, max_staleness=1),
    quorum.Arrive(0, 0),
    quorum.Done(0, 0, 1),
    quorum.Arrive(0, 1),
    quorum.Failed(0, 1, 1),
  )
  assert reason(run(state, quorum.Arrive(0, 0))[1]) == Reason.DUPLICATE
  assert kinds(run(state, quorum.Arrive(0, 1))[1])[0] == "Accept"


def test_attempts_are_counted_from_one_at_each_step():
  state = started(1, 1, two_phase=True)
  state, _ = run(state, quorum.Arrive(0, 0), quorum.Failed(0, 0, 1))
  state, decisions = run(state, quorum.Arrive(0, 0))
  assert decisions[1].attempt == 2
  state, _ = run(state, quorum.Done(0, 0, 2))
  _, decisions = run(state, quorum.Arrive(0, 1))
  assert (decisions[1].step, decisions[1].attempt) == (1, 1)


def test_what_comes_during_an_attempt_is_a_step_later_after_it():
  state = started(1, 2, two_phase=True, max_staleness=1, weight=lambda s: s + 2)
  state, _ = run(state, quorum.Arrive(0, 0), quorum.Arrive(1, 0))
  state, decisions = run(state, quorum.Done(0, 0, 1))
  assert kinds(decisions) == ["Commit", "Token", "StartAttempt"]
  (late,) = decisions[2].members
  assert (late.replica, late.staleness, late.weight) == (1, 1, 3.0)


def test_the_rest_is_not_asked_for_while_others_are_expected():
  state, _ = run(quorum.init(4, 2, two_phase=False), quorum.Join(0))
  state, decisions = run(state, quorum.Arrive(0, 0, count=2))
  assert kinds(decisions) == ["Accept", "Wait"]
  # Once no other replica is expected, it is.
  state, decisions = run(state, quorum.Leave(1))
  assert decisions == (quorum.Token(0, 0, count=2),)


def test_the_rest_is_not_mixed_with_gradients_of_an_older_step():
  state = started(6, 3, two_phase=True, max_staleness=1)
  state, _ = run(state, *(quorum.Arrive(r, 0, count=2) for r in range(3)))
  assert state.attempt
  state, _ = run(state, quorum.Lost(2), quorum.Join(2))
  state, _ = run(state, quorum.Lost(0), quorum.Lost(1))
  # Only replica 2 is left, and is asked for everything.
  state, _ = run(state, quorum.Arrive(2, 0, count=2))
  assert state.replicas.get(2).asked == 4
  state, decisions = run(state, quorum.Arrive(2, 0, count=4))
  assert decisions[1].members[0].count == 6


def test_an_older_sum_is_replaced_by_what_is_asked_for_later():
  state = started(4, 2, two_phase=True, max_staleness=1)
  state, _ = run(state, quorum.Arrive(0, 0, count=2))
  state, _ = run(state, quorum.Lost(1))
  # Alone it brings the rest; another replica joins during the attempt.
  state, _ = run(state, quorum.Arrive(0, 0, count=2), quorum.Join(1))
  state, _ = run(state, quorum.Arrive(1, 0, count=2))
  state, _ = run(state, quorum.Done(0, 0, 1))
  assert state.step == 1
  # What is in is a step old now. When the other dies, all is asked for anew.
  state, decisions = run(state, quorum.Lost(0))
  assert decisions == (quorum.Token(1, 1, count=4),)
  # Until all of that has come, and is finite, the older sum stays.
  state, decisions = run(state, quorum.Arrive(1, 1, finite=False, count=4))
  assert kinds(decisions) == ["Drop", "Token"]
  assert [c.count for c in state.inside.values()] == [2]
  state, decisions = run(state, quorum.Arrive(1, 1, count=4))
  assert decisions[0] == quorum.Drop(1, 0, Reason.SUPERSEDED, 2, 1)
  assert [m.count for m in decisions[2].members] == [4]
