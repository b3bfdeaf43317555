"""Properties of the default rules: what holds after every event.

Those of the coordinator's invariants that are the rules' are stated here alone;
those that need parameters are in tests/coordinator/test_replica.py.
"""

from rule_histories import check, random_history

from optax_dist import quorum
from optax_dist.quorum import Reason


def of(decisions, kind):
  return [d for d in decisions if isinstance(d, kind)]


def members(state):
  return state.round.members if state.round else ()


def test_a_live_replica_has_a_token_or_a_gradient_in():
  def holds(event, before, decisions, after):
    accepted = {c.replica for c in members(after)} | {*after.accepted}
    for replica, record in after.replicas.items():
      assert record.requested >= 0
      if record.live and not after.finished:
        assert record.requested or replica in accepted
    for token in of(decisions, quorum.Token):
      assert before.step <= token.step <= after.step
      later = decisions[decisions.index(token) + 1 :]
      if token.replica not in {
        d.replica for d in of(later, quorum.Accept | quorum.Token)
      }:
        assert after.replicas[token.replica].requested == token.count

  check(holds)


def test_a_gradient_gets_one_outcome():
  def holds(event, before, decisions, after):
    if not isinstance(event, quorum.Arrive):
      return
    replica, step, late = event.replica, event.local_step, before.config
    outcome = decisions[0]
    record = before.replicas.get(replica)
    if isinstance(outcome, quorum.Drop) and (
      outcome.reason == Reason.SUPERSEDED
    ):
      # An older gradient of the replica makes room for this one.
      held = before.accepted[replica]
      assert (outcome.local_step, outcome.count) == (
        held.local_step,
        held.count,
      )
      assert held.local_step < step
      outcome = decisions[1]
      assert isinstance(outcome, quorum.Accept)
    known = record is not None and record.live
    same = known and event.incarnation in (None, record.incarnation)
    assert outcome.replica == replica
    if isinstance(outcome, quorum.Accept):
      assert same
      assert event.finite
      assert record.requested >= event.count or before.config.exact
      assert before.step - late.max_staleness <= step <= before.step
      assert outcome.staleness == before.step - step
      assert (outcome.local_step, outcome.count) == (step, event.count)
      # It counts until something later takes it out.
      assert after.replicas[replica].counted == step or after.step > before.step
    else:
      assert (outcome.local_step, outcome.count) == (step, event.count)
      assert holds_of_reason(outcome.reason, event, before, record, same)
      whose = event.incarnation
      if whose is None:
        whose = -1 if record is None else record.incarnation
      assert outcome.incarnation == whose
      unknown = outcome.reason is Reason.UNKNOWN_REPLICA
      assert before.finished or unknown == (not known)

  check(holds)


def holds_of_reason(reason, event, before, record, same):
  """Whether what a reason says is so."""
  step, held = event.local_step, before.accepted.get(event.replica)
  late = before.step - step
  match reason:
    case Reason.FINISHED:
      return before.finished
    case Reason.UNKNOWN_REPLICA:
      return record is None or not record.live
    case Reason.OTHER_INCARNATION:
      return not same or step < record.start
    case Reason.STALE:
      return late > before.config.max_staleness
    case Reason.FUTURE:
      return late < 0
    case Reason.DUPLICATE:
      counted = step <= record.counted and not (
        held and held.local_step == step
      )
      return not record.requested or counted
    case Reason.NON_FINITE:
      return not event.finite
    case Reason.OVER_QUOTA:
      # A sum of a newer step takes the place of the older one.
      replaced = held.count if held and held.local_step != step else 0
      number = before.accepted_count + event.count - replaced
      number += sum(m.count for m in members(before))
      more = before.accepted_count + event.count - replaced
      full = before.config.exact and number > quorum.needed(before)
      full |= record.suspect and more > quorum.needed(before)
      return full or (
        event.count > record.requested and not before.config.exact
      )
  return False


def test_a_sum_stands_or_falls_as_a_whole():
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


def test_one_gradient_per_replica_and_step_counts():
  for seed in range(300):
    counted = set()
    for *_, decisions, _ in random_history(seed, "any"):
      for commit in of(decisions, quorum.Commit):
        for m in commit.members:
          key = (m.replica, m.incarnation, m.local_step)
          assert key not in counted, (seed, commit)
          counted.add(key)


def test_a_step_has_enough_fresh_gradients_with_their_weights():
  def holds(event, before, decisions, after):
    config = before.config
    for commit in of(decisions, quorum.Commit):
      assert commit.members == tuple(
        sorted(commit.members, key=lambda m: m.replica)
      )
      number = sum(m.count for m in commit.members)
      if not config.lower_on_leave:
        assert number >= config.replicas_to_aggregate
      if config.exact:
        assert number == config.replicas_to_aggregate
      for m in commit.members:
        assert m.staleness == commit.step - m.local_step
        assert 0 <= m.staleness <= config.max_staleness
        assert m.weight == (config.weight(m.staleness) if config.weight else 1)
    commits = of(decisions, quorum.Commit)
    assert [c.step for c in commits] == [*range(before.step, after.step)]

  check(holds)


def test_no_step_with_enough_gradients_is_held_back():
  def holds(event, before, decisions, after):
    if after.finished or after.round or not after.accepted_count:
      return
    open_ = after.config.window and not after.closed
    assert after.accepted_count < quorum.needed(after) or open_

  check(holds)


def test_what_healthy_replicas_are_asked_for_fills_the_step():
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


def test_who_cannot_proceed_is_told_why():
  def holds(event, before, decisions, after):
    have, need = after.live + after.awaited, quorum.needed(after)
    config = after.config
    if config.exact or config.replicas_to_aggregate > config.total_num_replicas:
      need = 1
    for told in of(decisions, quorum.CannotProceed):
      assert (told.step, told.have, told.needed) == (after.step, have, need)
      assert told.have < told.needed
      assert told.final == (have + after.lost < need)
      assert told.missing == quorum.missing(after).absent
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


def test_an_abandoned_attempt_keeps_the_gradients_of_the_others():
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


def test_each_count_is_of_what_it_says():
  # A replica that has a token and gets another is still one that computes.
  def holds(event, before, decisions, after):
    known = after.replicas.values()
    holders = [m for m in known if m.requested]
    assert after.working == len(holders)
    assert all(m.live for m in holders)
    assert after.live == sum(m.live for m in known)
    assert after.lost == sum(not m.live and not m.left for m in known)
    assert after.accepted_count == sum(c.count for c in after.accepted.values())
    absent = quorum.missing(after).absent
    assert len(absent) <= len(known) - after.live + after.awaited

  check(holds, "any", "crowded", "healthy")


def test_a_report_on_another_attempt_changes_nothing():
  def holds(event, before, decisions, after):
    if isinstance(event, quorum.Done | quorum.Failed):
      round_ = before.round
      of_it = (before.step, round_.number) if round_ else ()
      if (event.step, event.round) != of_it:
        assert (after, decisions) == (before, ())

  check(holds)


def test_a_finished_run_holds_nothing_and_stays_as_it_is():
  seen = 0

  def holds(event, before, decisions, after):
    nonlocal seen
    if before.finished:
      assert after == before
      return
    everybody = (after.live, after.awaited, after.lost)
    finish = isinstance(event, quorum.Finish)
    assert after.finished == (finish or not any(everybody))
    if after.finished:
      assert decisions[-1] == quorum.Finished(before.step)
      assert not after.round
      assert not after.accepted
      assert after.accepted_count == 0
      held = (*before.accepted.values(), *members(before))
      drops = of(decisions, quorum.Drop)
      result = {(d.replica, d.local_step, d.count) for d in drops}
      assert result == {(g.replica, g.local_step, g.count) for g in held}
      seen += len(held)
      if finish:
        assert decisions[:-1] == tuple(drops)
        assert {d.reason for d in drops} <= {Reason.FINISHED}

  check(holds)
  assert seen > 50


def test_enough_live_replicas_always_get_on():
  for seed in range(300):
    *_, state = random_history(seed, "any")[-1]
    if state.finished:
      continue
    # All come (back), work as they are told, and nothing more goes wrong.
    for replica in range(state.config.total_num_replicas):
      state, _ = quorum.step(state, quorum.Join(replica))
    target = state.step + 3
    for _ in range(200):
      if state.step >= target:
        break
      if state.round:
        event = quorum.Done(state.step, state.round.number)
      elif state.accepted_count >= quorum.needed(state):
        assert state.config.window
        event = quorum.Close(state.step)
      else:
        # Some replica has a token, or the run would stall.
        (worker, *_) = quorum.missing(state).computing
        asked = state.replicas.get(worker).requested
        if state.config.exact:
          asked = quorum.needed(state) - state.accepted_count
        event = quorum.Arrive(worker, state.step, count=asked)
      state, _ = quorum.step(state, event)
    assert state.step >= target, seed
