"""The state's fields against what they count, in random histories."""

from rule_histories import check

from optax_dist import quorum


def test_each_count_is_of_what_it_says():
  def holds(event, before, decisions, after):
    expected = after.config.expected
    known = after.replicas.values()
    assert after.live == sum(m.live for m in known)
    assert after.lost == sum(not m.live and not m.left for m in known)
    assert after.accepted_count == sum(c.count for c in after.accepted.values())
    if expected is not None:
      assert after.awaited == len(expected - set(after.replicas))
    else:
      assert 0 <= after.awaited <= after.config.total_num_replicas

  check(holds)


def test_missing_are_those_that_could_still_contribute():
  def holds(event, before, decisions, after):
    result = quorum.missing(after)
    for replica in result.computing:
      assert after.replicas[replica].live
      assert after.replicas[replica].requested
    assert len(result.computing) == after.working
    pending = after.round.pending if after.round else ()
    assert set(result.reporting) == set(pending)
    gone = {r for r, m in after.replicas.items() if not m.live}
    assert gone <= set(result.absent)
    assert set(result.absent) & set(result.computing) == set()
    never = set(result.absent) - gone
    assert not never & set(after.replicas)
    assert len(never) <= after.awaited

  check(holds)


def test_as_many_are_absent_as_are_awaited():
  """Without names, whoever comes takes the place of one that is expected."""
  state = quorum.init(2, 3)
  assert quorum.missing(state).absent == (0, 1, 2)
  state, _ = quorum.step(state, quorum.Join("spare"))
  assert quorum.missing(state).absent == (0, 1)
  state, _ = quorum.step(state, quorum.Join(1))
  assert quorum.missing(state).absent == (0,)
  state, _ = quorum.step(state, quorum.Join(7))
  assert quorum.missing(state).absent == ()


def test_one_that_nobody_named_takes_no_place():
  state = quorum.init(2, 2, replicas=["a", "b"])
  state, _ = quorum.step(state, quorum.Join("spare"))
  assert (state.awaited, quorum.missing(state).absent) == (2, ("a", "b"))


def test_the_ledger_has_attempted_gradients_inside():
  state = quorum.init(3, 2, max_staleness=1)
  for event in (quorum.Join(0), quorum.Join(1)):
    state, _ = quorum.step(state, event)
  for event in (
    quorum.Arrive(0, 0, count=2),
    quorum.Arrive(1, 0, count=2),
    quorum.Done(0, 0, 1),
  ):
    state, _ = quorum.step(state, event)
  assert state.round
  result = quorum.ledger(state)
  assert (result.arrived, result.applied, result.accepted) == (4, 0, 4)
  state, _ = quorum.step(state, quorum.Done(1, 0, 1))
  result = quorum.ledger(state)
  assert (result.arrived, result.applied, result.accepted) == (4, 4, 0)
