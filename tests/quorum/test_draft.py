"""A draft's numbers against plain sums: the quorum, shares and their excess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_dist import quorum
from optax_dist.quorum.draft import Draft, needed
from optax_dist.quorum.state import State


def joined(k, n, number, **options):
  """A run in which this many replicas have joined."""
  state = quorum.init(k, n, **options)
  for replica in range(number):
    state, _ = quorum.step(state, quorum.Join(replica))
  return state


def test_a_draft_that_nothing_changed_is_its_state():
  # Each field has a value of its own, so that none can take another's place.
  state = State._make({i: i} for i in range(len(State._fields)))
  assert Draft(state).freeze() == state


@given(
  st.integers(1, 6),
  st.integers(1, 6),
  st.integers(0, 6),
  st.integers(0, 6),
  st.integers(0, 6),
)
def test_only_leaves_for_good_lower_the_quorum(k, n, number, left, lost):
  number = min(number, n)  # The others have yet to come.
  state = joined(k, n, number, lower_on_leave=True, two_phase=False)
  left = min(left, number)
  lost = min(lost, number - left)
  gone = [quorum.Leave(replica) for replica in range(left)]
  gone += [quorum.Lost(number - 1 - i) for i in range(lost)]
  for event in gone:
    state, _ = quorum.step(state, event)
  expected = k if k > n else max(1, min(k, n - left))
  assert needed(state) == expected
  kept = state._replace(config=state.config._replace(lower_on_leave=False))
  assert needed(kept) == k


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 3), st.booleans())
def test_shares_are_enough_for_a_step_and_exact_ones_no_more(
  n, more, spare, exact
):
  k, number = n + more, n + spare
  draft = Draft(joined(k, n, number, exact=exact))
  quotas = [draft.quota(replica) for replica in range(number)]
  assert max(quotas) - min(quotas) <= (1 if exact else 0)
  assert min(quotas) >= 1
  if exact and number <= k:
    assert sum(quotas) == k
  else:
    assert sum(quotas) >= k
    assert sum(quotas) - k < len(quotas)


def test_one_gradient_each_where_there_are_enough_replicas():
  state, _ = quorum.step(joined(3, 3, 3, exact=True), quorum.Lost(2))
  draft = Draft(state)
  assert not draft.shared
  assert draft.quota(0) == draft.quota("unknown") == 1
  assert draft.excess(100) == 0


@given(st.integers(0, 12), st.integers(0, 12))
def test_excess_is_what_an_exact_step_has_no_place_for(inside, count):
  state = joined(7, 2, 2, exact=True)._replace(gathered=inside)
  assert Draft(state).excess(count) == max(0, inside + count - 7)
  loose = state._replace(config=state.config._replace(exact=False))
  assert Draft(loose).excess(count) == 0


@pytest.mark.parametrize(
  ("exact", "expected"), [(True, {0: 3, 1: 2}), (False, {0: 3, 1: 3})]
)
def test_the_rest_of_a_lost_replica_is_shared_out(exact, expected):
  """All have given theirs when the third is lost: the others give its, too."""
  state = joined(15, 3, 3, exact=exact)
  for replica in range(2):
    state, _ = quorum.step(state, quorum.Arrive(replica, 0, count=5))
  state, decisions = quorum.step(state, quorum.Lost(2))
  assert {d.replica: d.count for d in decisions} == expected
  assert all(isinstance(d, quorum.Token) for d in decisions)
  assert state.working == 2


def test_more_that_live_than_are_needed_are_not_all_asked():
  state = joined(3, 2, 3, exact=True)
  for replica in range(2):
    state, _ = quorum.step(state, quorum.Arrive(replica, 0))
  state, decisions = quorum.step(state, quorum.Lost(2))
  # One is lacking, so one of the two gives it.
  assert decisions == (quorum.Token(0, 0, 1),)
  assert state.working == 1


def test_a_token_twice_is_one_working_replica():
  draft = Draft(joined(4, 2, 2))
  assert draft.working == 2
  draft.ask(0, 3)
  assert draft.working == 2
  assert draft.replicas.get(0).asked == 3
  assert draft.decisions == [quorum.Token(0, 0, 3)]
