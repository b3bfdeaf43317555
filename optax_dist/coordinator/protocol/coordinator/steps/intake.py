r"""Gradients from a member's request until the quorum's rules get them.

All members must have had the chance to contribute to a step. So no gradient is accepted
before all members have called, a member has the state that the mean is applied to, and
it is decided which job the run has.

    submitted -> queued -> of a newcomer: it counts from now on, or with the next step
                       \-> the rules: accepted, or dropped

If a replica that joins again counted at once, all others would wait until it has the
state, has compiled, and has computed its first gradient. So where steps don't need it,
it is a newcomer, and counts only once its first gradient arrives. If that gradient is
too late for its step, the newcomer begins together with the others: at once if they
have just begun a step, otherwise after the next commit.
"""

from __future__ import annotations

import dataclasses

from optax_dist import quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps.consequences import (
  Consequence,
  Evict,
)
from optax_dist.coordinator.protocol.coordinator.steps.gradients import (
  Arrival,
  Gradients,
)
from optax_dist.coordinator.protocol.coordinator.steps.ruling import Ruling
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Member,
  ReplicaId,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.policies.policy import (
  GradientCheck,
  Policy,
)


@dataclasses.dataclass(slots=True)
class _Newcomer:
  """A member that steps don't wait for yet.

  Attributes:
    since: the first step that its gradients may be on.
    late: its first gradient, if that was too late for its step.
  """

  since: int
  late: msg.SubmitGradient | None = None


class Intake:
  """Asks members for gradients, and gives the rules what they submit, in order.

  Attributes:
    queue: gradients that have to wait, and their members.
    has_job: whether it is decided which job the run has, if replicas' jobs differ.
  """

  def __init__(
    self,
    config: Config,
    policy: Policy,
    ruling: Ruling,
    members: Members,
    gradients: Gradients,
    history: History,
    consequences: list[Consequence],
    out: Outbox,
  ):
    """Starts without gradients.

    Args:
      config: the run's.
      policy: checks gradients, and says what members compute.
      ruling: the rules.
      members: the members.
      gradients: the accepted gradients.
      history: knows the lost replicas.
      consequences: where evictions go.
      out: where messages go.
    """
    self._config, self._policy, self._ruling = config, policy, ruling
    self._members, self._gradients, self._history = members, gradients, history
    self._consequences, self._out = consequences, out
    self.queue: list[tuple[MemberState, msg.SubmitGradient]] = []
    self.has_job = True
    self._newcomers: dict[Incarnation, _Newcomer] = {}
    # When the last replica that the step waits for began it, and how long the
    # gradients of the step before took.
    self._began_at, self._seconds = 0.0, 0.0
    # Whether newcomers that are ready count from now on.
    self._may_begin = False

  # Members.

  def ends_in(self, member: Member) -> float | None:
    """For `Welcome`: seconds until the step ends, if it won't wait for a new member.

    The estimate is that its gradients take as long as those of the step before.
    """
    leased = self._config.job.data is not None
    if leased or not self._seconds or not self._ruling.can_go_without(member):
      return None
    return max(0.0, self._began_at + self._seconds - self._policy.now)

  def joined(self, state: MemberState, since: int) -> None:
    """A replica has become a member.

    Args:
      state: the member.
      since: the first step that its gradients may be on.
    """
    if self._ruling.can_go_without(state.member):
      self._newcomers[state.member.incarnation] = _Newcomer(since)
    else:
      self._ruling.join(state.member, since)

  def removed(self, member: Member, left: bool) -> None:
    """A member is lost, or has left."""
    incarnation = member.incarnation
    self._newcomers.pop(incarnation, None)
    if self._newcomers and self._ruling.is_short_without(member, left):
      # Without the newcomers, steps would wait for replicas that may never come.
      for newcomer in list(self._newcomers):
        self._count(self._members[newcomer])
    self.queue = [
      (state, message)
      for state, message in self.queue
      if state.member.incarnation != incarnation
    ]

  def reconnected(self, hello: msg.Hello) -> None:
    """A member has called; if it knows all steps, it knows when this step began."""
    if not self._began_at and hello.read == self._ruling.step and hello.since:
      self._began_at = self._policy.now - hello.since
      self._seconds = hello.compute

  def committed(self, compute: float) -> None:
    """A step is committed.

    Args:
      compute: the seconds that the slowest of its gradients took; 0 if unknown. The
        whole step may have taken longer, as it may have waited for other replicas.
    """
    now = self._policy.now
    self._seconds = compute or (now - self._began_at if self._began_at else 0.0)
    self._began_at, self._may_begin = now, True

  def not_finite(self) -> None:
    """A gradient was not finite: newcomers may count, so that they try its samples."""
    self._may_begin = True

  def _count(self, state: MemberState) -> None:
    """A newcomer counts, so that steps wait for it from now on."""
    newcomer = self._newcomers.pop(state.member.incarnation)
    self._ruling.join(state.member, newcomer.since)
    self.members_changed()
    if newcomer.late is not None:
      self.arrive(state, newcomer.late)

  def _begin_newcomers(self) -> None:
    """Newcomers whose first gradient was too late begin together with a step.

    If samples are leased, a newcomer gets samples only once it counts, so it counts as
    soon as it has the state.
    """
    leased = self._config.job.data is not None
    while self._may_begin:  # A late gradient may complete a step.
      self._may_begin = False
      for incarnation, newcomer in list(self._newcomers.items()):
        state = self._members[incarnation]
        if newcomer.late is not None or (leased and state.has(0)):
          self._count(state)

  # What members compute next, as the policy says.

  def members_changed(self) -> None:
    """The quorum may have changed."""
    to_come = len(self._history.lost()) + len(self._newcomers)
    self._policy.members_changed(self._ruling.state, to_come)
    self.announce()

  def tokens(self, tokens: dict[ReplicaId, int]) -> None:
    """Requests gradients from the members to which the rules have given tokens."""
    for incarnation, count in self.of_connected(tokens).items():
      self._policy.request(incarnation, count)
    self.announce()

  def announce(self) -> None:
    """Tells members what to compute next, unless another message has told them."""
    for requested in self._policy.announcements():
      state = self._members.get(requested.incarnation)
      if state is None:
        continue
      accepted = self._gradients.accepted.get(requested.incarnation)
      last = accepted[-1].message.sequence if accepted else -1
      request = msg.RequestGradients(last, requested.gradients, requested.lease)
      self._out.notify(state, request)

  def call(self, step: int) -> None:
    """Calls all members that have no gradient in a step that begins."""
    others = [
      state
      for state in self._members
      if state.member.incarnation not in self._gradients.accepted
    ]
    self._out.notify_all(others, msg.Call(step))

  def of_connected(
    self, tokens: dict[ReplicaId, int]
  ) -> dict[Incarnation, int]:
    """The tokens of members that are connected."""
    if not tokens:
      return {}
    states = {state.member.replica: state for state in self._members}
    connected = {}
    for replica, count in tokens.items():
      state = states.get(replica)
      if state is not None and state.is_connected:
        connected[state.member.incarnation] = count
    return connected

  # Gradients.

  def arrive(self, state: MemberState, message: msg.SubmitGradient) -> None:
    """A member has submitted a gradient, which may have to wait."""
    if not state.needs:
      state.applied = max(state.applied, message.applied)
    if self._may_process(state):
      self._arrive(state, message)
    else:
      self.queue.append((state, message))

  def check(self) -> None:
    """Gives queued gradients to the rules, in order, as far as possible."""
    self._begin_newcomers()
    while self.queue and self._may_process(self.queue[0][0]):
      self._arrive(*self.queue.pop(0))
      self._begin_newcomers()

  @property
  def has_state(self) -> bool:
    """Whether a member has the state that the next step is applied to.

    If gradients are sent inline, that always holds: a member with an older state gets
    all means in commits.
    """
    return self._config.inline or self._members.have(self._ruling.step)

  def _may_process(self, state: MemberState) -> bool:
    """Whether the rules may get a gradient now; otherwise it is queued."""
    if not (self._all_connected() and self.has_state and self.has_job):
      return False
    round_ = self._ruling.state.round
    if self._config.rules.alone:
      # During a round, two gradients could be accepted, and would then be averaged
      # instead of applied one by one.
      return round_ is None
    # If the round fails, its gradients count again, among them the one that this
    # gradient adds to or replaces.
    return round_ is None or not round_.has(state.member.replica)

  def _all_connected(self) -> bool:
    """Whether all members have called this coordinator, or had time to.

    A member that has yet to call may be the only one with the state, or with steps that
    the log has lost. It may also be needed as the witness of a single gradient's mean.
    """
    return all(state.is_connected for state in self._members.waiting())

  def _arrive(self, state: MemberState, message: msg.SubmitGradient) -> None:
    incarnation, replica = state.member.incarnation, state.member.replica
    if message.sequence <= state.sequence:
      # The first submission with this number has its answer, or will get it.
      self._out.send(
        state.member.process, msg.Rejected("a repeated submission")
      )
      return
    check = self._check_gradient(state, message)
    if check.refusal:
      # Evicted, or it would wait for an answer, and the others for its next gradient.
      why = f"it sent {check.refusal}"
      self._consequences.append(Evict(incarnation, why))
      return
    # Steps don't wait for a newcomer whose gradient is not finite.
    if incarnation in self._newcomers and check.finite:
      late = not self._is_fresh(message.local_step)
      # Under a policy that keeps steps open, learners don't wait for each other.
      if late and self._config.policy is None:
        if not self._can_keep_up():
          self._newcomers[incarnation].late = message
          return
        self._began_at = self._policy.now
      self._count(state)
    state.sequence = message.sequence
    local_step, ruling = message.local_step, self._ruling
    finite = check.finite
    if self._is_fresh(local_step) and finite:
      # The rules drop a gradient on another replica's samples like one with NaN.
      finite = check.fits
      size, expected = len(message.payload), 0
      if finite:
        expected = self._config.inline_size(message.data)
      if finite and size != expected:
        why = f"it sent a gradient of {size:,} bytes, not {expected:,}"
        self._consequences.append(Evict(incarnation, why))
        return
    ruling.apply(
      quorum.Arrive(replica, local_step, finite, incarnation, message.count),
      arriving=Arrival(incarnation, message, self._policy.now, check.finite),
    )

  def _can_keep_up(self) -> bool:
    """Whether less time is wasted in total if a newcomer joins the current step.

    If it joins now, each other member waits as long as it is ahead; otherwise the
    newcomer waits for the rest of the step.
    """
    ahead = self._policy.now - self._began_at
    return ahead * (len(self._members) - 1) < self._seconds - ahead

  def _check_gradient(
    self, state: MemberState, message: msg.SubmitGradient
  ) -> GradientCheck:
    if message.local_step > self._ruling.step:
      return GradientCheck("a gradient for a future step", False)
    if message.data and self._config.job.data is None:
      return GradientCheck("a gradient on samples, and none are leased", False)
    size, most = len(message.batches), self._config.most_text(message.count)
    if size > most:
      what = f"{size:,} bytes about its data, of {most:,} at most"
      return GradientCheck(what, False)
    if self._config.wrong_inline:
      return GradientCheck(self._config.wrong_inline, False)
    return self._policy.check_gradient(state.member.incarnation, message)

  def _is_fresh(self, local_step: int) -> bool:
    most = self._config.rules.max_staleness
    return quorum.accepts(local_step, self._ruling.step, most)
