"""The state's fields against what they count, in random histories."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rule_histories import CHOICES, OPTIONS, histories

from optax_dist import quorum


@given(OPTIONS, CHOICES, st.booleans())
@settings(max_examples=100)
def test_each_count_is_of_what_it_says(options, choices, named):
  n = options["total_num_replicas"]
  options = options | {"replicas": range(n) if named else None}
  for _, _, _, after in histories(options, choices):
    records = dict(after.replicas.items())
    known = records.values()
    assert after.live == sum(m.live for m in known)
    assert after.working == sum(bool(m.live and m.asked) for m in known)
    assert not any(m.asked for m in known if not m.live)
    assert after.lost == sum(not m.live and not m.left for m in known)
    inside = dict(after.inside.items())
    assert after.gathered == sum(c.count for c in inside.values())
    if named:
      assert after.awaited == len(set(range(n)) - set(records))
    else:
      assert 0 <= after.awaited <= n


@given(OPTIONS, CHOICES)
@settings(max_examples=100)
def test_missing_are_those_that_could_still_contribute(options, choices):
  for _, _, _, after in histories(options, choices):
    found = quorum.missing(after)
    records = dict(after.replicas.items())
    for replica in found.computing:
      assert records[replica].live
      assert records[replica].asked
    assert len(found.computing) == after.working
    pending = after.attempt.pending if after.attempt else ()
    assert set(found.reporting) == set(pending)
    gone = {r for r, m in records.items() if not m.live}
    assert gone <= set(found.absent)
    assert set(found.absent) & set(found.computing) == set()
    never = set(found.absent) - gone
    assert not never & set(records)
    assert len(never) <= after.awaited


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


def test_the_ledger_has_early_and_attempted_gradients_inside():
  state = quorum.init(3, 2, max_staleness=1)
  for event in (quorum.Join(0), quorum.Join(1)):
    state, _ = quorum.step(state, event)
  for event in (
    quorum.Arrive(0, 0, count=2),
    quorum.Arrive(1, 0, count=2),
    quorum.Done(0, 0, 1),
    quorum.Arrive(0, 1, count=1),
  ):
    state, _ = quorum.step(state, event)
  assert state.attempt
  assert [early.count for early in state.early.values()] == [1]
  found = quorum.ledger(state)
  assert (found.arrived, found.applied, found.inside) == (5, 0, 5)
  state, _ = quorum.step(state, quorum.Done(1, 0, 1))
  found = quorum.ledger(state)
  assert (found.arrived, found.applied, found.inside) == (5, 4, 1)
