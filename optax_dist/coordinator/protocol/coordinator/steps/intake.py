r"""Gradients that come in, until the rules may have them.

A step's mean is that of what all could have brought, so nothing is accepted before
all members have called, and one has the state that it is applied to.

    Arrive -> queued -> of a newcomer: it counts from now on, or with the next step
                    \-> the rules: accepted, or dropped
"""

from __future__ import annotations

from optax_dist import quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps.asks import Asks
from optax_dist.coordinator.protocol.coordinator.steps.consequences import (
  Consequence,
  Evict,
)
from optax_dist.coordinator.protocol.coordinator.steps.gradients import (
  Arrival,
  Gradients,
)
from optax_dist.coordinator.protocol.coordinator.steps.newcomers import (
  Newcomers,
  raises,
)
from optax_dist.coordinator.protocol.coordinator.steps.ruling import Ruling
from optax_dist.coordinator.protocol.entries import Incarnation, Member
from optax_dist.coordinator.protocol.policies.policy import Policy


class Intake:
  """Gives the rules what members submit, in order, when it can count."""

  def __init__(
    self,
    config: Config,
    policy: Policy,
    ruling: Ruling,
    gradients: Gradients,
    members: Members,
    asks: Asks,
    consequences: list[Consequence],
    out: Outbox,
  ):
    """Starts without any.

    Args:
      config: the run's.
      policy: says what fits.
      ruling: the rules.
      gradients: where they wait.
      members: the members.
      asks: told of newcomers that count.
      consequences: where evictions go.
      out: where messages go.
    """
    self._config, self._policy, self._ruling = config, policy, ruling
    self._gradients, self._members, self._asks = gradients, members, asks
    self._consequences, self._out = consequences, out
    self._newcomers = Newcomers()

  # Members.

  def ends_in(self, member: Member) -> float | None:
    """For `Welcome`, if steps would not wait for a new member at first."""
    join = quorum.Join(member.replica, member.incarnation)
    if self._config.job.data is None and raises(self._ruling.state, join):
      return self._newcomers.ends_in(self._policy.now)
    return None

  def joined(self, state: MemberState) -> None:
    """A replica has become a member."""
    member = state.member
    join = quorum.Join(member.replica, member.incarnation)
    if raises(self._ruling.state, join):
      self._newcomers.add(member.incarnation)
    else:
      self._ruling.apply(join)

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone."""
    self._newcomers.remove(incarnation)
    if len(self._newcomers) == len(self._members):
      # Nobody else is left.
      for newcomer in self._members:
        self._count(newcomer.member.incarnation)
    self._gradients.dismiss(incarnation)

  def committed(self) -> None:
    """A step is committed."""
    self._newcomers.committed(self._policy.now)

  def not_finite(self) -> None:
    """A gradient was not finite: newcomers are to try its samples."""
    self._newcomers.begin()

  def _count(self, incarnation: Incarnation, since: int | None = None) -> None:
    """Steps wait for a newcomer from now on.

    Args:
      incarnation: the newcomer.
      since: the step that its gradient is on, which it was given before it counted.
    """
    late = self._newcomers.remove(incarnation)
    state = self._members[incarnation]
    self._ruling.apply(quorum.Join(state.member.replica, incarnation))
    if since is not None:
      self._ruling.count_from(state.member.replica, since)
    self._asks.members_changed()
    if late is not None:
      self.arrive(state, late)

  def _waits_for_samples(self, incarnation: Incarnation) -> bool:
    """Whether a newcomer has the state, but gets samples only once it counts."""
    state = self._members[incarnation]
    return self._config.job.data is not None and state.has(0)

  # Gradients.

  def arrive(self, state: MemberState, message: msg.SubmitGradient) -> None:
    """A member submits a gradient, which may have to wait."""
    if not state.needs:
      state.applied = max(state.applied, message.applied)
    if self._may_process(state, message):
      self._arrive(state, message)
    else:
      self._gradients.queue(state.member.incarnation, message)

  def check(self) -> None:
    """Goes on with what waits, in order, as far as possible."""
    for incarnation in self._newcomers.due(self._waits_for_samples):
      self._count(incarnation)
    while (queued := self._gradients.queued) is not None:
      incarnation, message = queued
      state = self._members[incarnation]  # `removed` forgets others.
      if not self._may_process(state, message):
        return
      self._gradients.unqueue()
      self._arrive(state, message)

  @property
  def has_state(self) -> bool:
    """Whether a member has the state that the next step is applied to.

    If gradients are sent inline, whoever has an older one gets the means.
    """
    return self._config.inline or self._members.have(self._ruling.step)

  def _may_process(
    self, state: MemberState, message: msg.SubmitGradient
  ) -> bool:
    """Whether the rules may get a gradient now; otherwise it is queued."""
    if not (self._all_connected() and self.has_state):
      return False
    round_ = self._ruling.state.round
    if self._config.rules.alone:
      # Two that arrive meanwhile would be averaged, not applied one by one.
      return round_ is None
    # If the round fails, the sum that it extends is accepted again.
    return (
      round_ is None
      or message.count == message.total
      or state.member.replica not in round_.incarnations
    )

  def _all_connected(self) -> bool:
    """Whether all members have called this coordinator, or had time to.

    One that has yet to call may be the only one with the state, or with steps that
    the log has lost; and with a single gradient, another one gets the mean too.
    """
    return all(state.is_connected for state in self._members.waiting())

  def _arrive(self, state: MemberState, message: msg.SubmitGradient) -> None:
    incarnation, replica = state.member.incarnation, state.member.replica
    why = self._refusal(state, message)
    if why:
      self._out.send(state.member.process, msg.Rejected(why))
      return
    if incarnation in self._newcomers:
      if self._begins_later(incarnation, message):
        return
      self._count(incarnation, message.local_step)
    state.sequence = message.sequence
    local_step, ruling = message.local_step, self._ruling
    held = ruling.state.accepted.get(replica)
    inside = held.count if held and held.local_step == local_step else 0
    if inside + message.count != message.total:
      # A sum whose first part was decided separately in the meantime: of no
      # step, and too old at the first one already.
      local_step = -1 - self._config.rules.max_staleness
    finite = is_finite = self._policy.is_finite(incarnation, message)
    if self._is_fresh(local_step) and finite:
      # For the rules, a gradient on another replica's samples is as bad as NaN.
      finite = self._policy.may_accept(incarnation, message)
      found, expected = len(message.payload), 0
      if finite:
        before = self._policy.data(incarnation) if inside else ()
        expected = self._config.inline_size((*before, *message.data))
      if finite and found != expected:
        why = f"it sent a gradient of {found:,} bytes, not {expected:,}"
        self._consequences.append(Evict(incarnation, why))
        return
    ruling.apply(
      quorum.Arrive(replica, local_step, finite, incarnation, message.count),
      Arrival(incarnation, message, self._policy.now, is_finite),
    )

  def _refusal(self, state: MemberState, message: msg.SubmitGradient) -> str:
    """What is wrong with a submission; "" for nothing."""
    if message.sequence <= state.sequence or message.count > message.total:
      return "a submission out of order"
    if message.local_step > self._ruling.step:
      return "a gradient for a future step"
    return self._policy.admit(state.member.incarnation, message)

  def _is_fresh(self, local_step: int) -> bool:
    most = self._config.rules.max_staleness
    return quorum.accepts(local_step, self._ruling.step, most)

  def _begins_later(
    self, incarnation: Incarnation, message: msg.SubmitGradient
  ) -> bool:
    """Whether a newcomer's gradient is too late, and it begins with the others."""
    live, now = self._ruling.state.live, self._policy.now
    return (
      not self._is_fresh(message.local_step)
      and self._config.policy is None  # Its learners don't wait for each other.
      and self._newcomers.wait(incarnation, message, live, now)
    )
