"""A state's numbers against plain sums: the quorum, shares and their excess."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from optax_dist import quorum


def joined(k, n, number, **options):
  """A run in which this many replicas have joined."""
  state = quorum.init(k, n, **options)
  for replica in range(number):
    state, _ = quorum.step(state, quorum.Join(replica))
  return state


@given(
  st.integers(1, 6),
  st.integers(1, 6),
  st.integers(0, 6),
  st.integers(0, 6),
  st.integers(0, 6),
)
def test_only_final_departures_lower_the_quorum(k, n, number, left, lost):
  number = min(number, n)  # The others have yet to come.
  state = joined(k, n, number, lower_on_leave=True, two_phase=False)
  left = min(left, number)
  lost = min(lost, number - left)
  gone = [quorum.Leave(replica) for replica in range(left)]
  gone += [quorum.Lost(number - 1 - i) for i in range(lost)]
  for event in gone:
    state, _ = quorum.step(state, event)
  expected = k if k > n else max(1, min(k, n - left))
  assert quorum.needed(state) == expected
  kept = dataclasses.replace(
    state, config=state.config._replace(lower_on_leave=False)
  )
  assert quorum.needed(kept) == k


def test_rest_of_a_lost_replica_is_distributed():
  """All have given theirs when the third is lost: the others give its, too."""
  state = joined(15, 3, 3)
  for replica in range(2):
    state, _ = quorum.step(state, quorum.Arrive(replica, 0, count=5))
  state, decisions = quorum.step(state, quorum.Lost(2))
  assert decisions == (quorum.Token(0, 0, 3), quorum.Token(1, 0, 3))
  assert state.working == 2


def test_step_does_not_wait_for_the_share_of_a_nonfinite_replica():
  state = joined(6, 3, 3, two_phase=False)
  for replica in range(2):
    state, _ = quorum.step(state, quorum.Arrive(replica, 0, count=2))
  bad = quorum.Arrive(2, 0, finite=False, count=2)
  state, decisions = quorum.step(state, bad)
  assert decisions[1:] == (
    quorum.Token(2, 0, 2),
    quorum.Token(0, 0, 1),
    quorum.Token(1, 0, 1),
  )
  assert quorum.step(state, bad)[1][1:] == (quorum.Token(2, 0, 2),)
  # It may still be the one that brings them, if the others have not begun to.
  good = quorum.Arrive(2, 0, count=2)
  assert quorum.step(state, good)[0].step == 1
  state, _ = quorum.step(state, quorum.Arrive(0, 0, count=1))
  _, (drop, _) = quorum.step(state, good)
  assert drop.reason is quorum.Reason.OVER_QUOTA
  assert quorum.step(state, quorum.Arrive(1, 0, count=1))[0].step == 1


def test_replica_of_an_exact_step_gets_another_request_at_once():
  state = joined(6, 2, 2, exact=True)
  state, decisions = quorum.step(state, quorum.Arrive(0, 0, count=2))
  assert decisions[-1] == quorum.Token(0, 0, 4)
  state, decisions = quorum.step(state, quorum.Arrive(0, 0, count=3))
  assert decisions[-1] == quorum.Token(0, 0, 1)
  # The last one is another replica's: with it, the step is complete.
  state, decisions = quorum.step(state, quorum.Arrive(1, 0, count=1))
  assert [m.count for m in decisions[-1].members] == [5, 1]


def test_commit_of_an_exact_step_asks_all_live_replicas():
  """A replica that still computes is asked, too: its step was decided without it."""
  state = joined(2, 3, 3, exact=True, two_phase=False)
  state, decisions = quorum.step(state, quorum.Arrive(1, 0, count=2))
  tokens = [d for d in decisions if isinstance(d, quorum.Token)]
  assert tokens == [quorum.Token(replica, 1, 2) for replica in range(3)]
