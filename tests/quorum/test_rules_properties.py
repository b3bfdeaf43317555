"""Properties of the default rules: what holds after every event.

What a run's steps and outcomes are, the simulation's checker states (A1 to A7): here is
what no run of its coordinator comes to.
"""

from rule_histories import check

from optax_dist import quorum
from optax_dist.quorum import Reason


def of(decisions, kind):
  return [d for d in decisions if isinstance(d, kind)]


def members(state):
  return state.round.members if state.round else ()


def test_a_dropped_addition_leaves_the_sum():
  seen = 0

  def holds(event, before, decisions, after):
    nonlocal seen
    drops = of(decisions, quorum.Drop)
    if not isinstance(event, quorum.Arrive) or before.finished or not drops:
      return
    held = before.accepted.get(event.replica)
    if drops[0].reason in (Reason.NON_FINITE, Reason.OVER_QUOTA) and held:
      seen += 1
      assert after.accepted[event.replica] == held

  check(holds)
  assert seen > 20


def test_no_step_with_enough_gradients_is_held_back():
  def holds(event, before, decisions, after):
    if after.finished or after.round or not after.accepted_count:
      return
    open_ = after.config.window and not after.closed
    assert after.accepted_count < quorum.needed(after) or open_

  check(holds)


def test_requests_to_healthy_replicas_fill_the_step():
  def holds(event, before, decisions, after):
    config = after.config
    if config.replicas_to_aggregate <= config.total_num_replicas:
      return
    assert not of(decisions, quorum.Drop)
    if after.round:
      return
    asked = sum(record.requested for record in after.replicas.values())
    assert asked >= config.replicas_to_aggregate - after.accepted_count

  check(holds, "healthy")


def test_replica_that_cannot_proceed_is_notified_of_the_reason():
  def holds(event, before, decisions, after):
    have, need = after.live + after.awaited, quorum.needed(after)
    config = after.config
    if config.exact or config.replicas_to_aggregate > config.total_num_replicas:
      need = 1
    for decision in of(decisions, quorum.CannotProceed):
      assert (decision.step, decision.have, decision.needed) == (
        after.step,
        have,
        need,
      )
      assert decision.have < decision.needed
      assert decision.final == (have + after.lost < need)
      assert decision.missing == quorum.missing(after).absent
      assert not after.round
      assert not after.finished
    departed = isinstance(event, quorum.Lost | quorum.Leave)
    if departed and before == after:
      assert decisions == ()
    gone = departed and before != after
    ended = before.round and isinstance(event, quorum.Done | quorum.Failed)
    if (gone or (ended and not after.round)) and have < need:
      waits = after.round or after.finished
      assert waits or of(decisions, quorum.CannotProceed)

  check(holds)


def test_abandoned_round_keeps_the_gradients_of_the_others():
  seen = 0

  def holds(event, before, decisions, after):
    nonlocal seen
    for abandoned in of(decisions, quorum.Abandon):
      seen += 1
      round_ = before.round
      assert (abandoned.step, abandoned.round) == (
        before.step,
        round_.number,
      )
      accepted = {*after.accepted.values(), *members(after)}
      dropped = {d.replica: d.reason for d in of(decisions, quorum.Drop)}
      for m in round_.members:
        if m.replica != abandoned.failed_replica:
          newer = before.accepted.get(m.replica)
          assert (newer or m) in accepted
          assert (dropped.get(m.replica) == Reason.SUPERSEDED) == bool(newer)
      assert abandoned.failed_replica in dropped
      if after.round:
        assert after.round.number == round_.number + 1
      record = after.replicas[abandoned.failed_replica]
      newer = abandoned.failed_replica in before.accepted
      assert bool(record.requested) == (record.live and not newer)

  check(holds)
  assert seen > 100


def test_a_joining_replica_gets_the_present_step():
  def holds(event, before, decisions, after):
    if not isinstance(event, quorum.Join) or before.finished:
      return
    old = before.replicas.get(event.replica)
    if not decisions:
      assert event.incarnation <= old.incarnation
      assert before == after
      return
    record = after.replicas[event.replica]
    earlier = -1 if old is None else old.incarnation
    expected = event.incarnation
    assert record.incarnation == (earlier + 1 if expected is None else expected)
    assert record.live
    assert not record.left
    assert (record.counted, record.start) == (-1, before.step)
    assert (
      quorum.Token(event.replica, before.step, record.requested) in decisions
    )
    was = old is not None and old.live
    assert after.live == before.live + (not was)

  check(holds)


def test_report_on_another_round_changes_nothing():
  def holds(event, before, decisions, after):
    if isinstance(event, quorum.Done | quorum.Failed):
      round_ = before.round
      of_it = (before.step, round_.number) if round_ else ()
      if (event.step, event.round) != of_it:
        assert (after, decisions) == (before, ())

  check(holds)
