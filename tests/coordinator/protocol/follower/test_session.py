"""Submissions: one outcome each, and never one that the log doesn't have."""

from optax_dist.coordinator.protocol.effects import Resolved, Taken
from optax_dist.coordinator.protocol.entries import AttemptId, Committed, Part
from optax_dist.coordinator.protocol.follower.session import Session
from optax_dist.coordinator.protocol.inputs import Submitted

ME = 7


def submission(sequence, total=1, extends=-1):
  return Submitted(sequence, extends, 1, 0, total, True, b"")


def commit(sequence, step=0):
  parts = (
    Part(3, 0, 9, step, 0, 1, 1.0),
    Part(ME, 1, sequence, step - 1, 1, 1, 0.5),
  )
  attempt = AttemptId(0, step, 1, 0)
  return Committed(attempt, parts, b"", False, (), ())


def test_a_commit_is_told_once_its_step_is_published():
  session = Session()
  assert session.submit(submission(0)) == []
  session.committed(commit(0, step=4), ME)
  assert session.pending is None
  assert session.waits
  assert session.published(4) == []
  assert session.published(5) == [Resolved(0, "", 5, (0, 1), 1)]
  assert not session.waits


def test_another_membership_s_part_is_not_its_own():
  session = Session()
  session.submit(submission(0))
  session.committed(commit(0), ME + 1)
  assert session.pending is not None


def test_a_drop_is_told_at_once_and_only_of_what_is_there():
  session = Session()
  session.submit(submission(3))
  assert session.dropped(2, "stale") == []
  assert session.dropped(3, "stale") == [Resolved(3, "stale", 0)]
  assert session.dropped(3, "stale") == []


def test_a_sum_is_taken_in_and_goes_on():
  session = Session()
  session.submit(submission(0, total=2))
  assert session.count() == 2
  assert session.asked_for_more(0) == [Taken(0)]
  assert session.pending is None
  assert session.submit(submission(1, total=3, extends=0)) == []
  assert session.count() == 1
  assert session.find(0) is not None
  session.committed(commit(1), ME)
  (outcome,) = session.published(1)
  assert (outcome.sequence, outcome.reason, outcome.apart) == (1, "", False)
  assert session.taken is None


def test_a_superseded_sum_may_be_decided_by_itself():
  session = Session()
  session.submit(submission(0, total=2))
  session.asked_for_more(0)
  session.committed(commit(0), ME)
  (told,) = session.submit(submission(1, total=3, extends=0))
  assert (told.sequence, told.reason, told.apart) == (1, "superseded", True)
  assert [o.sequence for o in session.published(1)] == [0]


def test_a_new_leader_is_sent_the_whole_sum():
  session = Session()
  session.submit(submission(0, total=2))
  session.asked_for_more(0)
  session.submit(submission(1, total=3, extends=0))
  assert session.new_leader() == []
  assert session.count() == 3


def test_a_new_leader_can_not_wait_for_what_the_old_one_had():
  session = Session()
  session.submit(submission(0, total=2))
  session.asked_for_more(0)
  assert session.new_leader() == [Resolved(0, "lost", 0)]


def test_what_is_lost_is_told_and_what_counts_is_kept():
  session = Session()
  session.submit(submission(0))
  session.committed(commit(0), ME)
  session.submit(submission(1))
  assert session.lost("lost") == [Resolved(1, "lost", 0)]
  assert [o.sequence for o in session.published(1)] == [0]


def test_a_commit_of_what_was_given_up_tells_nothing():
  session = Session()
  session.submit(submission(0))
  session.lost("lost")
  session.committed(commit(0), ME)
  assert session.published(1) == []


def test_a_partial_sum_is_waited_for():
  session = Session()
  session.submit(submission(0))
  session.asked_for_more(0)
  assert not session.waits
  session.submit(submission(1, 2, extends=0))
  (told,) = session.dropped(1, "stale", whole=False)
  assert told.apart
  assert session.waits
  session.new_leader()
  assert not session.waits


def test_a_sum_that_is_dropped_as_a_whole_leaves_nothing_in():
  session = Session()
  session.submit(submission(0))
  session.asked_for_more(0)
  session.submit(submission(1, 2, extends=0))
  (told,) = session.dropped(1, "failed")
  assert not told.apart
  # Otherwise the training loop would wait indefinitely for the buffered one.
  assert not session.waits
  assert session.submit(submission(2)) == []
  assert session.count() == 1


def test_a_sum_that_extends_a_committed_one_is_not_sent_to_a_new_leader():
  session = Session()
  session.submit(submission(0))
  session.asked_for_more(0)
  session.submit(submission(1, total=2, extends=0))
  # The leader that was told of both is lost; the next one knows of neither.
  session.committed(commit(0, step=4), ME)
  assert session.pending is None
  assert session.new_leader() == []
  assert session.published(5) == [
    Resolved(0, "", 5, (0, 1), 1),
    Resolved(1, "superseded", 0, apart=True),
  ]


def test_a_partial_sum_is_lost_with_its_membership():
  session = Session()
  session.submit(submission(0))
  assert session.asked_for_more(1) == []  # Of another submission.
  assert session.asked_for_more(0) == [Taken(0)]
  assert session.lost("lost") == [Resolved(0, "lost", 0)]
  assert session.lost("lost") == []


def test_a_sum_that_extends_no_buffered_one_counts_as_a_whole():
  session = Session()
  session.submit(submission(0))
  session.asked_for_more(0)
  session.submit(submission(1, total=3))
  assert session.count() == 3


def test_a_partial_sum_has_the_outcome_of_the_sum_that_extends_it():
  session = Session()
  session.submit(submission(0))
  session.asked_for_more(0)
  session.submit(submission(1, 2, extends=0))
  assert [told.sequence for told in session.lost("lost")] == [1]
