"""The lease manager: which gradients may be accepted."""

import pytest

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.leader.leases import LeaseManager
from optax_dist.ledger import spans as sp


def arrive(spans, count=1):
  return msg.Arrive(0, 0, count, count, True, 0, b"", "", None, b"", spans)


def test_a_gradient_must_be_on_the_samples_of_its_lease():
  lends = LeaseManager(ledger.Batches(60, 6), 3, ledger.Progress())
  lends.ask(0, 1)
  lends.ask(1, 1)
  mine, theirs = (ask.lease for ask in lends.announcements())
  assert lends.fits(0, arrive(mine))
  assert not lends.fits(0, arrive(theirs))
  assert not lends.fits(0, arrive(mine, count=2))
  assert not lends.fits(0, arrive(()))
  lends.accepted(0, arrive(mine), 0.0)
  assert not lends.fits(0, arrive(mine))
  assert lends.data(0) == mine
  assert lends.state.held[0] == ledger.Held((), mine, 0)


class Step:
  """A deterministic step of eight slots, shared by its members."""

  def __init__(self, *members):
    data = ledger.Batches(80, 8, micro_batch=1, deterministic=True)
    self.lends = LeaseManager(data, 8, ledger.Progress())
    self.lends.now = 0.0
    state = quorum.init(8, len(members), exact=True)
    for member in members:
      state, _ = quorum.step(state, quorum.Join(member))
    self.lends.members_changed(state)
    for member in members:
      self.lends.ask(member, 8)
    self.leases = {}
    self.told = self.tell()

  def tell(self):
    told = {ask.incarnation: ask.lease for ask in self.lends.announcements()}
    self.leases |= told
    return told

  def bring(self, member, now, spans=None):
    """A member has computed what it was told to, and asks for more."""
    self.lends.now = now
    spans = self.leases[member] if spans is None else spans
    message = arrive(spans, sp.size(spans))
    if not self.lends.fits(member, message):
      return None
    self.lends.accepted(member, message, now)
    self.lends.ask(member, 8)
    return self.tell()

  def wait(self, now):
    """Time passes until the lease manager has something to say."""
    assert self.lends.deadline == pytest.approx(now)
    self.lends.now = self.lends.deadline
    return self.tell()


def test_a_fast_member_gets_more_slots_of_a_step():
  step = Step(0, 1)
  assert step.told == {0: ((0, 2),), 1: ((2, 4),)}
  assert step.bring(0, 2.0) == {0: ((4, 5),)}
  assert step.bring(0, 3.0) == {0: ((5, 6),)}
  assert step.bring(0, 4.0) == {0: ((6, 7),)}
  assert step.bring(0, 5.0) == {0: ((7, 8),)}


def begun():
  """Member 0 has computed all but the two slots that member 1 has."""
  step = Step(0, 1)
  for slot in range(5):
    told = step.bring(0, 2.0 + slot)
  return step, told


def test_an_idle_member_takes_a_late_members_last_slot():
  """It took a second each, and would have ended the other one's in two."""
  step, told = begun()
  # The other one is late by more than a slot takes; it leaves its last one out.
  assert told == {0: ((3, 4),), 1: ((2, 3),)}
  # The slot that it is at is repeated once it's late in turn.
  assert step.bring(0, 7.0) == {0: ((2, 3),)}
  # The first result counts.
  assert step.bring(0, 8.0) == {1: ()}
  assert step.bring(1, 9.0, ((2, 3),)) is None


def test_a_result_that_comes_first_ends_the_repetition():
  step, _ = begun()
  step.bring(0, 7.0)
  assert step.bring(1, 7.5) == {0: ()}
  assert step.lends.data(1) == ((2, 3),)


def test_a_slot_that_was_already_computed_may_be_brought_all_the_same():
  step, _ = begun()
  # It had both when it was told to leave the last one out.
  assert step.bring(1, 6.5, ((2, 4),)) == {0: ()}


def test_a_member_that_is_on_time_is_left_alone():
  step = Step(0, 1)
  for now in (2.0, 3.0):
    step.bring(0, now)
    step.bring(1, now)
  assert step.leases == {0: ((6, 7),), 1: ((7, 8),)}
  assert step.bring(0, 4.0) == {}
  # The other one should be done now, and is waited for as long as a slot takes.
  assert step.wait(5.0) == {0: ((7, 8),)}


def test_what_a_lost_member_was_computing_is_computed_in_the_same_step():
  step = Step(0, 1)
  step.bring(0, 2.0)
  step.lends.removed(1, ())
  for now in range(3, 9):
    if sp.size(step.lends.data(0)) < 8:
      step.bring(0, float(now))
  assert sp.union(step.lends.data(0)) == ((0, 8),)


def test_a_new_leader_leaves_each_slot_with_one_of_its_claimants():
  step = Step(0, 1)
  step.lends.claim(0, ((0, 2),), 8)
  step.tell()
  step.lends.claim(1, ((1, 4),), 8)
  assert step.tell() == {1: ((2, 4),)}
