"""The view of the log: the same for all who have read as much."""

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import (
  STORE_VALUES,
  AttemptId,
  Committed,
  Ended,
  Joined,
  Member,
  Part,
  Record,
  Removed,
  Term,
)
from optax_dist.coordinator.protocol.membership import View
from optax_dist.ledger import Progress


def term(number=0, leader="a", fresh=True, incarnation=0, step=0):
  return Term(number, leader, f"at {leader}", fresh, incarnation, 0, step, "s")


def member(incarnation, replica, process):
  return Member(incarnation, replica, process, f"at {process}")


def committed(step, *, save=False):
  parts = (Part(0, 0, step, step, 0, 2, 1.0), Part(1, 1, step, step, 0, 1, 1.0))
  attempt = AttemptId(0, step, 1, 1)
  return Committed(attempt, parts, b"m", save, (), (("stale", 3),))


def view_of(*entries):
  view = View()
  for position, entry in enumerate(entries):
    view.apply(position, Record(max(view.term, 0), (entry,)))
  return view


RUN = (
  term(),
  Joined(member(1, 1, "b")),
  committed(0),
  Joined(member(2, 2, "c")),
  Removed(1, True, "left"),
  committed(1, save=True),
)


def test_it_knows_members_steps_and_leaders():
  view = view_of(*RUN)
  assert sorted(view.members) == [0, 2]
  assert view.departed == {1: True}
  assert (view.step, view.applied) == (2, 6)
  assert (view.membership, view.next_incarnation) == (4, 3)
  assert (view.leader, view.terms) == ("a", [0])
  assert not view.untouched
  assert view.of_process("c") == view.of_replica(2) == view.members[2]
  assert view.of_process("b") is None


def test_a_replica_that_joins_again_takes_its_own_place():
  view = view_of(*RUN, Joined(member(3, 2, "d")))
  assert sorted(view.members) == [0, 3]


def test_a_fresh_term_begins_with_its_leader_alone():
  view = view_of(term(), Joined(member(1, 1, "b")), term(1, "b", True, 2))
  assert list(view.members) == [2]
  assert view.membership == 2
  assert view.untouched


def test_a_fresh_term_begins_with_the_samples_of_its_state():
  done = Progress(8)
  fresh = Term(1, "b", "at b", True, 1, 1, 0, "s", done)
  assert view_of(term(), fresh).progress == done


def test_a_commit_that_does_not_follow_names_the_damage():
  view = view_of(*RUN, committed(3))
  assert (
    view.broken == "record 6 of the log commits step 3, and the next one is 2"
  )


def test_a_leader_that_was_no_member_becomes_one():
  view = view_of(*RUN, Removed(0, False, "lost"), term(1, "d", False, 3, 2))
  assert sorted(view.members) == [2, 3]
  assert (view.term, view.leader, view.step) == (1, "d", 2)


def test_a_view_goes_whole_over_a_connection():
  view = view_of(*RUN, Ended(2, "enough", "", (("stale", 4),)))
  welcome = msg.Welcome(0, 6, view, -1)
  assert msg.MESSAGES.decode(msg.MESSAGES.encode(welcome)) == welcome
  assert STORE_VALUES.decode(STORE_VALUES.encode(Record(0, RUN))) == Record(
    0, RUN
  )


def test_a_copy_is_its_own():
  view = view_of(*RUN)
  copy = view.copy()
  copy.apply(6, Record(0, (Removed(2, False, "lost"),)))
  copy.apply(7, Record(1, (term(1, "c", False, 2, 2),)))
  assert sorted(view.members) == [0, 2]
  assert view.terms == [0]


def test_a_run_that_begins_at_a_later_step_is_untouched_until_a_commit():
  view = view_of(term(step=5))
  assert view.untouched
  view.apply(1, Record(0, (committed(5),)))
  assert not view.untouched


def test_a_replica_that_came_back_has_not_departed():
  first, again = (Joined(member(i, 1, f"b{i}")) for i in (1, 2))
  view = view_of(term(), first, Removed(1, False, "lost"), again)
  assert view.departed == {}
