"""Tests of the members as the leader knows them."""

import math

from optax_dist.coordinator.protocol.entries import Member
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster


def state(incarnation, replica=0, process=None, **fields):
  member = Member(incarnation, replica, process or f"p{incarnation}", "")
  return MemberState(member, **fields)


def test_a_member_is_found_by_incarnation_process_and_replica():
  roster = Roster()
  one, other = state(0, replica="a"), state(1, replica="b")
  roster.add(one)
  roster.add(other)
  assert len(roster) == 2
  assert list(roster) == [one, other]
  assert roster.get(1) is roster[1] is other
  assert roster.of_process("p0") is one
  assert roster.of_replica("b") is other
  assert 0 in roster
  assert 2 not in roster
  assert roster.get(2) is roster.of_process("p2") is None
  assert roster.of_replica("c") is None


def test_an_evicted_replica_is_no_member():
  roster = Roster()
  roster.add(state(0))
  assert roster.remove(0)
  assert not roster.remove(0)
  assert len(roster) == 0
  assert roster.of_process("p0") is None


def test_an_old_membership_of_a_process_takes_no_new_one_with_it():
  roster = Roster()
  roster.add(state(0, process="p"))
  new = state(1, process="p")
  roster.add(new)
  roster.remove(0)
  assert roster.of_process("p") is new


def test_absent_leaving_and_stateless_members_wait():
  roster = Roster()
  plain, absent = state(0), state(1, until=5.0)
  needs, leaves = state(2, needs=True), state(3, leaving=(4, 1.0))
  for one in (plain, absent, needs, leaves):
    roster.add(one)
  assert roster.waiting() == [absent, needs, leaves]
  absent.until, needs.needs = math.inf, False
  roster.changed()
  assert roster.waiting() == [leaves]
  roster.remove(3)
  assert roster.waiting() == []


def test_what_was_served_ends_the_need_and_nothing_takes_a_step_back():
  one = state(0, applied=7, needs=True, server=1, tried={2})
  assert not one.has(7)
  one.has_applied(7)
  assert one == state(0, applied=7)
  assert one.has(7)
  assert not one.has(8)
  one.has_applied(5)
  assert one.has(7)


def test_a_report_of_an_earlier_snapshot_does_not_stand_for_the_pending_one():
  one = state(0, applied=7, needs=True, server=1, tried={2})
  one.has_applied(5)
  assert one == state(0, applied=5)


def test_the_best_server_has_the_latest_state_stays_and_is_not_the_leader():
  roster = Roster()
  needs = state(0, needs=True)
  leader, leaves = state(1, applied=9), state(2, applied=9, leaving=(9, 0.0))
  behind, able = state(3, applied=8), state(4, applied=9)
  for one in (needs, leader, leaves, behind, able):
    roster.add(one)
  found = []
  while server := roster.server_for(needs, 9, "p1"):
    if server.member.incarnation in needs.tried or len(found) == 4:
      break
    found.append(server)
    needs.tried.add(server.member.incarnation)
  assert found == [able, leader, leaves, behind]


def test_who_has_all_failed_is_tried_again():
  roster = Roster()
  needs, only = state(0, needs=True, tried={1}), state(1, applied=3)
  roster.add(needs)
  roster.add(only)
  assert roster.server_for(needs, 3, "p1") is only
  assert needs.tried == set()


def test_nobody_can_serve_what_nobody_has():
  roster = Roster()
  needs = state(0, needs=True)
  roster.add(needs)
  roster.add(state(1, applied=-1))
  roster.add(state(2, applied=3, needs=True))
  assert roster.server_for(needs, 3, "p1") is None


def test_who_was_served_by_a_removed_member_needs_another_server():
  roster = Roster()
  served, other = state(0, needs=True, server=2), state(1, server=3)
  for one in (served, other, state(2), state(3)):
    roster.add(one)
  roster.remove(2)
  assert (served.server, other.server) == (None, 3)


def test_who_comes_again_asks_again_for_what_it_needs():
  one = state(0, until=5.0, applied=3, needs=True, server=1, tried={2})
  one.comes(4)
  assert one == state(0, applied=4)
