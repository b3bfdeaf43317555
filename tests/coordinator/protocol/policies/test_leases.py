"""The lease manager: which gradients may be accepted."""

import pytest

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.protocol.policies.leases import LeaseManager
from optax_dist.ledger import spans as sp


def arrive(spans, count=1):
  return msg.SubmitGradient(0, 0, 0, count, True, data=spans)


class Step:
  """A deterministic step of eight slots, shared by its members."""

  def __init__(self, *members, slots=8):
    data = ledger.Batches(80, slots, micro_batch=1, deterministic=True)
    self.lends = LeaseManager(data, slots, ledger.Progress(), 160.0)
    self.lends.now = 0.0
    self.state = quorum.init(slots, len(members), exact=True)
    self.leases = {}
    for member in members:
      self.join(member, 0.0)

  def join(self, member, now):
    self.lends.now = now
    self.state, _ = quorum.step(self.state, quorum.Join(member, member))
    self.lends.members_changed(self.state, 0)
    self.lends.request(member, 8)
    return self.tell()

  def tell(self):
    asks = self.lends.announcements()
    assert all(a.gradients == max(1, sp.size(a.lease)) for a in asks)
    leases = {ask.incarnation: ask.lease for ask in asks}
    self.leases |= leases
    return leases

  def bring(self, member, now, spans=None):
    """A member has computed its slots, and asks for more."""
    self.lends.now = now
    spans = self.leases[member] if spans is None else spans
    message = arrive(spans, sp.size(spans))
    assert not self.lends.check_gradient(member, message).refusal
    if not self.lends.check_gradient(member, message).fits:
      return None
    self.lends.accepted(member, message)
    self.lends.request(member, 8)
    return self.tell()

  def wait(self, now):
    """Time passes until the lease manager has something to say."""
    assert self.lends.deadline == pytest.approx(now)
    self.lends.now = self.lends.deadline
    return self.tell()

  def commit(self, now):
    """The step is committed; returns the leases of the next one."""
    self.lends.now = now
    known = self.lends.state.held
    held = {m: known[m].accepted if m in known else () for m in self.leases}
    parts = tuple(
      entries.Part(m, m, 0, 0, 0, sp.size(spans), 1.0, sp.union(spans))
      for m, spans in held.items()
      if spans
    )
    result = self.lends.committed(parts, dict.fromkeys(held, 8), 0.0)
    leases = {one.incarnation: one.spans for one in result.leases if one.spans}
    self.leases = dict.fromkeys(held, ()) | leases
    return leases


def test_slots_are_leased_in_proportion_to_speed():
  step = Step(0, 1)
  assert step.leases == {0: ((0, 4),), 1: ((4, 8),)}
  step.bring(0, 4.0)
  step.bring(1, 12.0)
  # Slots took one second and three.
  assert step.commit(12.0) == {0: ((8, 14),), 1: ((14, 16),)}


def test_slow_member_gets_no_slot_for_some_steps():
  step = Step(0, 1, slots=2)
  step.bring(0, 1.0)
  step.bring(1, 5.0)
  assert step.commit(5.0) == {0: ((2, 4),)}
  steps = 0
  while len([spans for spans in step.leases.values() if spans]) == 1:
    now = step.lends.now + 2.0
    step.bring(0, now)
    step.commit(now)
    steps += 1
    assert steps < 30


def test_idle_member_takes_slots_that_another_has_not_begun():
  step = Step(0, 1)
  step.bring(0, 4.0)
  step.bring(1, 4.0)
  assert step.commit(4.0) == {0: ((8, 12),), 1: ((12, 16),)}
  # It is faster now, and the other one should be at the second of four.
  assert step.bring(0, 5.0) == {0: ((15, 16),), 1: ((12, 15),)}


def late():
  """Member 1 should have had its slots long ago, by the pace of the other one."""
  step = Step(0, 1)
  step.bring(0, 4.0)
  assert step.wait(5.0) == {0: ((7, 8),), 1: ((4, 7),)}
  return step


def test_an_idle_member_takes_a_late_members_last_slots():
  step = late()
  assert step.bring(0, 6.0) == {0: ((6, 7),), 1: ((4, 6),)}
  assert step.bring(0, 7.0) == {0: ((5, 6),), 1: ((4, 5),)}
  # The slot that it is at is repeated.
  assert step.bring(0, 8.0) == {0: ((4, 5),)}
  # The first result counts.
  assert step.bring(0, 9.0) == {1: ()}
  assert step.bring(1, 9.5, ((4, 5),)) is None


def test_only_slot_of_a_hanging_member_is_repeated():
  """No member has brought a slot yet, so no pace is known."""
  step = Step(0, 1, slots=1)
  assert step.leases == {0: ((0, 1),)}
  assert step.wait(20.0) == {1: ((0, 1),)}


def test_zeros_that_are_no_longer_needed_do_not_lower_trust():
  """A replica that found a nonfinite slot is trusted once another agrees."""
  step = Step(0, 1, slots=2)
  (slot,) = step.leases[0]
  work = audit.pack(slot[0], audit.NOT_FINITE)
  zeros = msg.SubmitGradient(0, 0, 0, 1, True, data=(slot,), work=work)
  assert not step.lends.check_gradient(0, zeros).finite  # One is not enough.
  step.lends.dropped(0, zeros, True, 1, quorum.Reason.NON_FINITE)
  assert step.bring(1, 1.0)[1] == (slot,)
  step.lends.check_gradient(1, zeros)
  step.lends.dropped(1, zeros, True, 1, quorum.Reason.RETURNED)
  assert step.lends.check_gradient(0, zeros).finite
