"""The lease manager: which gradients may be accepted."""

import pytest

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol import codec, entries
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.protocol.policies.leases import LeaseManager
from optax_dist.coordinator.protocol.policies.sharing import Sharing
from optax_dist.ledger import spans as sp


def arrive(spans, count=1):
  return msg.SubmitGradient(0, 0, 0, count, count, True, data=spans)


def test_a_gradient_must_be_on_the_samples_of_its_lease():
  lends = LeaseManager(ledger.Batches(60, 6), 3, ledger.Progress(), 16.0)
  lends.request(0, 1)
  lends.request(1, 1)
  mine, theirs = (ask.lease for ask in lends.announcements())
  assert lends.check_gradient(0, arrive(mine)).fits
  assert not lends.check_gradient(0, arrive(theirs)).fits
  assert not lends.check_gradient(0, arrive(mine, count=2)).fits
  assert not lends.check_gradient(0, arrive(())).fits
  lends.accepted(0, arrive(mine))
  assert not lends.check_gradient(0, arrive(mine)).fits
  assert lends.data(0) == mine
  assert lends.state.held[0] == ledger.Held((), mine, 0)


def test_a_sum_that_is_dropped_after_it_was_accepted_returns_all_its_samples():
  lends = LeaseManager(ledger.Batches(60, 6), 6, ledger.Progress(), 16.0)
  lends.request(0, 2)
  (ask,) = lends.announcements()
  first, second = sp.head(ask.lease, 1)
  for spans in (first, second):
    lends.accepted(0, arrive(spans))
  assert lends.data(0) == ask.lease
  lends.dropped(0, arrive(second, count=2), False, None, "stale")
  assert lends.data(0) == ()
  lends.request(1, 2)
  (again,) = lends.announcements()
  assert again.lease == ask.lease


def test_a_member_that_gets_no_lease_with_a_commit_is_told_so():
  """With its old lease it would compute a gradient that can't count any more."""
  data = ledger.Batches(8, 6, shuffle=False)
  lends = LeaseManager(data, 3, ledger.Progress(), 16.0)
  for member in range(3):
    lends.request(member, 1)
  leases = {ask.incarnation: ask.lease for ask in lends.announcements()}
  for member, lease in leases.items():
    lends.accepted(member, arrive(lease))
  parts = tuple(
    entries.Part(m, m, 0, 0, 0, 1, 1.0, lease) for m, lease in leases.items()
  )
  result = lends.committed(parts, dict.fromkeys(leases, 1), 0.0)
  assert {one.incarnation: one.spans for one in result.leases} == {
    0: (),
    1: (),
    2: (),
  }


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
    self.state, _ = quorum.step(self.state, quorum.Join(member))
    self.lends.members_changed(self.state, 0)
    self.lends.request(member, 8)
    return self.tell()

  def tell(self):
    asks = self.lends.announcements()
    assert all(a.gradients == max(1, sp.size(a.lease)) for a in asks)
    told = {ask.incarnation: ask.lease for ask in asks}
    self.leases |= told
    return told

  def bring(self, member, now, spans=None):
    """A member has computed what it was told to, and asks for more."""
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
    held = {m: self.lends.data(m) for m in self.leases}
    parts = tuple(
      entries.Part(m, m, 0, 0, 0, sp.size(spans), 1.0, sp.union(spans))
      for m, spans in held.items()
      if spans
    )
    result = self.lends.committed(parts, dict.fromkeys(held, 8), 0.0)
    told = {one.incarnation: one.spans for one in result.leases if one.spans}
    self.leases = dict.fromkeys(held, ()) | told
    return told


def test_members_share_a_step_in_runs():
  step = Step(0)
  assert step.leases == {0: ((0, 8),)}
  # Nobody has begun the last slots by then.
  assert step.join(1, 1.0) == {0: ((0, 5),), 1: ((5, 8),)}


def test_a_step_is_shared_by_how_fast_its_members_are():
  step = Step(0, 1)
  assert step.leases == {0: ((0, 4),), 1: ((4, 8),)}
  step.bring(0, 4.0)
  step.bring(1, 12.0)
  # Slots took one second and three.
  assert step.commit(12.0) == {0: ((8, 14),), 1: ((14, 16),)}


def test_only_a_member_without_slots_moves_towards_the_mean_pace():
  sharing = Sharing(1, 16.0)
  for member, seconds in ((0, 1.0), (1, 3.0)):
    sharing.assign(member, ((member, member + 1),), 0.0)
    sharing.brought(member, ((member, member + 1),), 0.0, seconds)
  for _ in range(20):
    assert sharing.share((0, 1), 8) == {0: 6, 1: 2}


def test_compiling_does_not_make_a_member_a_slow_one():
  sharing = Sharing(1, 16.0)
  for member, compiled in ((0, 9.0), (1, 0.0)):
    sharing.assign(member, ((member, member + 1),), 0.0)
    slot = ((member, member + 1),)
    sharing.brought(member, slot, compiled, 1.0 + compiled)
  assert sharing.share((0, 1), 8) == {0: 4, 1: 4}


def test_a_member_that_would_be_too_slow_gets_nothing_for_a_while():
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


def test_an_idle_member_takes_what_another_one_has_not_begun():
  step = Step(0, 1)
  step.bring(0, 4.0)
  step.bring(1, 4.0)
  assert step.commit(4.0) == {0: ((8, 12),), 1: ((12, 16),)}
  # It is faster now, and the other one should be at the second of four.
  assert step.bring(0, 5.0) == {0: ((15, 16),), 1: ((12, 15),)}


def test_the_fastest_of_the_idle_members_takes_them():
  sharing = Sharing(1, 16.0)
  for member, seconds in ((0, 2.0), (1, 1.0), (2, 3.0)):
    sharing.assign(member, ((member, member + 1),), 0.0)
    sharing.brought(member, ((member, member + 1),), 0.0, seconds)
  assert sharing.by_pace((0, 1, 2, 3)) == [1, 0, 3, 2]


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


def test_a_result_that_comes_first_ends_the_repetition():
  step = late()
  for now in (6.0, 7.0, 8.0):
    step.bring(0, now)
  assert step.bring(1, 8.5) == {0: ()}
  assert step.lends.data(1) == ((4, 5),)


def test_a_slot_that_was_already_computed_may_be_brought_all_the_same():
  step = late()
  # It had all when it was told to leave the last one out.
  assert step.bring(1, 5.5, ((4, 8),)) == {0: ()}


def test_a_member_that_is_on_time_is_left_alone():
  step = Step(0, 1)
  assert step.bring(0, 3.9) == {}
  # The other one is waited for as long as a slot takes.
  assert step.lends.deadline == pytest.approx(3.9 + 3.9 / 4)


def test_the_only_slot_of_one_that_hangs_is_repeated():
  """Though no member has brought a slot, so that none's pace is known."""
  step = Step(0, 1, slots=1)
  assert step.leases == {0: ((0, 1),)}
  assert step.wait(20.0) == {1: ((0, 1),)}


def test_what_a_lost_member_was_computing_is_computed_in_the_same_step():
  step = Step(0, 1)
  step.bring(0, 2.0)
  step.lends.removed(1)
  step.state, _ = quorum.step(step.state, quorum.Lost(1))
  step.lends.members_changed(step.state, 0)
  step.tell()
  for now in range(3, 9):
    if sp.size(step.lends.data(0)) < 8:
      step.bring(0, float(now))
  assert sp.union(step.lends.data(0)) == ((0, 8),)


def test_a_slot_that_was_left_out_for_a_lost_member_is_given_to_another():
  step = late()
  step.lends.removed(0)
  step.state, _ = quorum.step(step.state, quorum.Lost(0))
  step.lends.members_changed(step.state, 0)
  assert step.join(2, 5.5) == {2: ((0, 4),)}
  # The late member has not come back, and does not compute the slot.
  assert step.bring(2, 5.6) == {2: ((7, 8),)}


def test_a_member_that_claims_nothing_from_a_new_leader_gets_its_share():
  data = ledger.Batches(80, 8, micro_batch=1, deterministic=True)
  lends = LeaseManager(data, 8, ledger.Progress(), 160.0)
  lends.now = 0.0
  state = quorum.init(8, 2, exact=True)
  for member in range(2):
    state, _ = quorum.step(state, quorum.Join(member))
  lends.members_changed(state, 0)
  lends.claim(0, (), 8)
  (ask,) = lends.announcements()
  assert ask.lease == ((0, 4),)


def test_a_new_leader_leaves_each_slot_with_one_of_its_claimants():
  step = Step(0, 1)
  step.lends.claim(0, ((0, 2),), 8)
  step.tell()
  step.lends.claim(1, ((1, 4),), 8)
  assert step.tell() == {1: ((2, 4),)}


def members_of_audited_steps(number):
  """Members who are to compute steps of one slot, each of which is audited."""
  data = ledger.Batches(8, 1, micro_batch=1, deterministic=True, audit=1.0)
  lends = LeaseManager(data, 1, ledger.Progress(), 160.0)
  lends.now = 0.0
  state = quorum.init(1, number, exact=True, window=True)
  for member in range(number):
    state, _ = quorum.step(state, quorum.Join(member))
    lends.members_changed(state, 0)
    lends.request(member, 1)
  lends.announcements()
  return lends, state


def bring(lends, member, digest):
  """A member has computed the slot of step 0."""
  lends.now += 1.0
  message = codec.replace(arrive(((0, 1),)), work=audit.pack(0, digest))
  assert not lends.check_gradient(member, message).refusal
  if lends.check_gradient(member, message).fits:
    lends.accepted(member, message)
  lends.announcements()


def audited(*digests):
  """Members have computed the only slot of a step, one after the other.

  Returns:
    The lease manager, who they were, and whether it closes the step after each.
  """
  lends, state = members_of_audited_steps(len(digests))
  state, _ = quorum.step(state, quorum.Arrive(0, 0))
  who, closes = [], []
  for digest in digests:
    member = next(m for m in range(len(digests)) if lends.lease(m))
    assert member not in who
    bring(lends, member, digest)
    who.append(member)
    closes.append(lends.closes(state, 0.0))
  return lends, who, closes


def test_a_slot_is_not_computed_again_once_its_step_is_committed():
  """An audit does not hold up a step while others may be compiling yet."""
  lends, _ = members_of_audited_steps(2)
  bring(lends, 0, bytes([1] * 16))
  assert lends.lease(1) == ((0, 1),)
  parts = (entries.Part(0, 0, 0, 0, 0, 1, 1.0, ((0, 1),)),)
  lends.committed(parts, {0: 1, 1: 1}, 0.0)
  assert (lends.lease(0), lends.lease(1)) == (((1, 2),), ())


def test_a_step_waits_for_its_audit_once_two_members_have_computed():
  right, wrong = bytes([1] * 16), bytes([2] * 16)
  lends, _, closes = audited(right, right)
  # Before, the other one may be compiling yet.
  assert closes == [True, True]
  assert lends.verdict() is None
  lends, who, closes = audited(right, wrong, right)
  assert closes == [True, False, False]
  assert lends.verdict().wrong == (who[1],)


def test_only_slots_that_count_are_named_as_not_finite():
  step = Step(0, 1)
  step.bring(1, 1.0)
  theirs = step.lends.data(1)
  mine = step.leases[0]
  work = audit.pack(theirs[0][0], audit.NOT_FINITE)
  message = codec.replace(arrive(mine, sp.size(mine)), work=work)
  assert not step.lends.check_gradient(0, message).refusal
  step.lends.accepted(0, message)
  parts = tuple(
    entries.Part(m, m, 0, 0, 0, 1, 1.0, step.lends.data(m)) for m in (0, 1)
  )
  assert step.lends.committed(parts, {0: 8, 1: 8}, 0.0).skipped == ()
