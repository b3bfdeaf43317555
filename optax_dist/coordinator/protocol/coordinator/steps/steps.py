"""Steps of the run: gradients in, the quorum's decisions out.

    members -> Intake      gradients that can count   -> Ruling -> decisions
            -> Rounds      rounds that have the mean  -> Ruling -> decisions
    decisions -> Gradients the log, then all members
              -> Intake    what members compute next
              -> Stall     which replicas a step waits for

A `Policy` decides the rest, such as which member computes on which samples; here its
decisions are only passed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from optax_dist import quorum
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps import not_finite
from optax_dist.coordinator.protocol.coordinator.steps.consequences import (
  Consequence,
  Evict,
  Fail,
)
from optax_dist.coordinator.protocol.coordinator.steps.gradients import (
  Arrival,
  Gradients,
)
from optax_dist.coordinator.protocol.coordinator.steps.intake import Intake
from optax_dist.coordinator.protocol.coordinator.steps.rounds import Rounds
from optax_dist.coordinator.protocol.coordinator.steps.ruling import Ruling
from optax_dist.coordinator.protocol.coordinator.steps.stall import Stall
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Incarnation,
  ReplicaId,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.policies.audit import Verdict


class Steps:
  """Takes the steps of a run.

  Attributes:
    ruling: the rules.
    policy: decides what the rules don't.
    gradients: the gradients on their way into a step.
    intake: requests gradients, and takes in what members submit.
    rounds: the aggregation of a step.
    consequences: what the run has to do, in order; `Run` empties the list.
  """

  def __init__(
    self, config: Config, history: History, members: Members, out: Outbox
  ):
    """Starts where the log ends, without members.

    Args:
      config: the run's.
      history: what the log says.
      members: the members.
      out: what is written and sent.
    """
    self._config, self._members, self._out = config, members, out
    self._history = history
    self.consequences: list[Consequence] = []
    self.ruling = Ruling(config, history, members, self._follow)
    self.rounds = Rounds(history.epoch, config.deadlines, members, out)
    self.policy = policy = config.make_policy(history.progress)
    self.gradients = Gradients(config, policy, history)
    self.intake = Intake(
      config,
      policy,
      self.ruling,
      members,
      self.gradients,
      history,
      self.consequences,
      out,
    )
    self._stall = Stall(config.rules, self.intake, self.rounds, members, out)

  def begin(self, until: float) -> None:
    """Continues with the members of the log; see `Ruling.begin`."""
    taken = self._history.recent
    known = {part.incarnation for step in taken for part in step.parts}
    new = [s for s in self._members if s.member.incarnation not in known]
    config = self._config
    # A member that has leased samples counts already: before it counted, it got none.
    leased = config.job.data is not None
    if (
      leased or len(new) == len(self._members) or not config.rules.lower_on_loss
    ):
      new = []
    # A member without a gradient in a recent step may still be compiling.
    self.ruling.begin(until, new)
    for state in new:
      # Members may still submit gradients that are this stale.
      late = self._config.rules.max_staleness
      self.intake.joined(state, self.step - late)
    self.intake.members_changed()

  # The rules.

  @property
  def step(self) -> int:
    """The step that is taken next."""
    return self.ruling.step

  def at(self, now: float) -> None:
    """Sets the time."""
    self.policy.now = now

  def deadlines(self) -> list[float]:
    """When `check` may have something to do."""
    return [
      self.policy.deadline,
      self.ruling.expected_until,
      self._go_on_at,
      self.rounds.deadline,
      *self._stall.deadlines(),
    ]

  def check(self) -> None:
    """Does what is due now, and goes on with queued gradients."""
    now = self.policy.now
    if now >= self.ruling.expected_until:
      self.ruling.stop_expecting()
      self.intake.members_changed()
    if now >= self._go_on_at:
      self._go_on_without_absent(now)
      self._evict_not_finite()
    self.intake.check()
    verdict = self.policy.verdict()
    if verdict is not None:
      self._audited(verdict)
    self._check_window(now)
    self._stall.queued(bool(self.intake.queue), now)
    self.ruling.apply(*self.rounds.check(now))
    why = self._stall.check(self.ruling.state, now)
    if why:
      self.consequences.append(Fail(why))
    self._swap()
    for state in self._members:
      if state.not_finite:
        is_blocked = self.policy.is_blocked(state.member.incarnation)
        not_finite.name(state, self.step, is_blocked, self._out)

  @property
  def _go_on_at(self) -> float:
    """When steps go on without the absent and the not finite; infinity for never."""
    rules, since = self._config.rules, self._stall.since
    if since is None or not rules.lower_on_loss:
      return math.inf
    if not (self.ruling.state.awaited or self._not_finite):
      return math.inf
    # Well before `timeout` ends the run. A replica that joins later is a newcomer.
    return since + rules.timeout / 2

  @property
  def _not_finite(self) -> list[MemberState]:
    """Members with gradients that are not finite, for which others wait."""
    if self.rounds.current is not None or not self.gradients.accepted:
      return []
    return [state for state in self._members if state.named_at]

  def _evict_not_finite(self) -> None:
    """Evicts these members; another start of them is a newcomer."""
    for state in self._not_finite:
      why = (
        f"its last {state.not_finite} gradients are not finite; look at its data and"
        " at its devices"
      )
      evict = Evict(state.member.incarnation, why, wrong=True)
      self.consequences.append(evict)

  def _go_on_without_absent(self, now: float) -> None:
    """Counts replicas that have never joined as lost, and tells the members."""
    if not self.ruling.state.awaited:
      return
    assert self._stall.since is not None
    known = self.ruling.state.replicas
    expected = range(self._config.rules.total_num_replicas)
    absent = [replica for replica in expected if replica not in known]
    names = ", ".join(map(str, absent))
    text = f"steps go on without replica {names}, which has never joined"
    waited = now - self._stall.since
    self._out.notify_all(self._members, msg.Stalled(self.step, waited, text))
    self.never_joined(absent)

  def _audited(self, verdict: Verdict) -> None:
    """Evicts members whose gradients are wrong, or ends the run."""
    replicas = {i: self._members[i].member.replica for i in verdict.digests}
    names, wrong = [*replicas.values()], [replicas[i] for i in verdict.wrong]
    digests = {str(replicas[i]): d for i, d in verdict.digests.items()}
    self._out.note(
      journal_events.Audit(self.step, verdict.slot, digests, wrong)
    )
    what = f"gradient of micro-batch {verdict.slot} of step {self.step}"
    others = [name for name in names if name not in wrong]
    why = f"its {what} is not what replicas {others} have computed"
    for incarnation in verdict.wrong:
      self.consequences.append(Evict(incarnation, why, wrong=True))
    if not wrong:
      why = (
        f"Replicas {names} have computed different values of the {what}, and no"
        " other replica is left to decide which is wrong. Resume from the last"
        " checkpoint with three replicas, which can."
      )
      self.consequences.append(Fail(why))

  def end(self) -> None:
    """Ends the current round: no more steps are taken."""
    self._stall.end()
    self.rounds.void_early()
    self._cancel_round()

  # Members.

  def joined(self, state: MemberState) -> None:
    """A replica has become a member."""
    self.rounds.void_early()
    self.intake.joined(state, self.step)
    self.ruling.forget_departed()
    self.intake.members_changed()

  def reconnected(self, state: MemberState, hello: msg.Hello) -> None:
    """A member has called."""
    self.intake.reconnected(hello)
    known = self.ruling.state.replicas.get(state.member.replica)
    count = known.requested if known is not None else 0
    self.policy.claim(state.member.incarnation, hello.lease, count)
    self.intake.announce()

  def removed(self, state: MemberState, left: bool) -> None:
    """A member has left, or is lost."""
    incarnation = state.member.incarnation
    self.intake.removed(state.member, left)
    self.rounds.void_early()
    # The rules must know first: otherwise, if the member was a witness, its round could
    # end, and the next step could begin with the lost member's gradient.
    self.ruling.removed(state.member, left)
    self.ruling.apply(*self.rounds.lost(state.member))
    self.policy.removed(incarnation)
    self.intake.announce()
    self.intake.members_changed()
    self._stall.removed(incarnation, bool(self.gradients.accepted))

  def never_joined(self, replicas: Iterable[ReplicaId]) -> None:
    """Counts replicas as lost that have died before they joined."""
    if self.ruling.never_joined(replicas):
      self.intake.members_changed()

  # Decisions.

  def _follow(
    self, decisions: Sequence[quorum.Decision], arriving: Arrival | None
  ) -> None:
    """Carries out decisions of the rules, for a gradient that has just come, if any."""
    tokens = {
      d.replica: d.count for d in decisions if isinstance(d, quorum.Token)
    }
    for decision in decisions:
      match decision:
        case quorum.Token():
          pass
        case quorum.Accept():
          assert arriving is not None
          self._accept(arriving)
        case quorum.Drop():
          self._drop(decision, tokens, arriving)
        case quorum.StartRound():
          self._start(decision)
        case quorum.Abandon():
          self._abandon(decision)
        case quorum.Commit():
          self._commit(decision, tokens)
        case quorum.CannotProceed():
          self._stall.cannot_proceed(decision)
          if decision.final:
            why = f"The run cannot go on: {decision}"
            self.consequences.append(Fail(why))
        case quorum.Finished():
          return
        case _:
          assert_never(decision)
    self.intake.tokens(tokens)

  def _accept(self, arriving: Arrival) -> None:
    incarnation, message = arriving.incarnation, arriving.message
    self.gradients.accepted.setdefault(incarnation, []).append(arriving)
    state = self._members[incarnation]
    state.not_finite = state.named_at = 0
    if self.policy.accepted(incarnation, message):
      self.intake.call(message.local_step)
    if self.policy.has_begun(message.local_step):
      self._stall.accepted(self.policy.now)

  def _delivered(self, state: MemberState, reason: str, count: int) -> None:
    """A member has delivered gradients that were dropped."""
    member = state.member
    self._stall.dropped(
      member.incarnation, member.replica, reason, count, self.policy.now
    )
    if self.policy.has_begun(self.step):
      self._stall.waits()
    if reason == quorum.Reason.NON_FINITE:
      state.not_finite += count
      self.intake.not_finite()

  def _swap(self) -> None:
    """Has a member try samples on which others' gradients were not finite."""
    if self.rounds.current is not None or self.ruling.state.finished:
      return
    incarnation = self.policy.swap()
    state = None if incarnation is None else self._members.get(incarnation)
    if state is not None:
      self.ruling.apply(
        quorum.Return(state.member.replica, state.member.incarnation)
      )

  def _drop(
    self,
    drop: quorum.Drop,
    tokens: dict[ReplicaId, int],
    arriving: Arrival | None,
  ) -> None:
    # Members that have begun the early round wait for this gradient in vain.
    self.rounds.void_early()
    incarnation = drop.incarnation
    arrivals, reason = self.gradients.drop(drop, arriving)
    message, is_new = arrivals[-1].message, arrivals[-1] is arriving
    state = self._members.get(incarnation)
    requested = tokens.pop(drop.replica, None)
    lease = self.policy.dropped(
      incarnation, message, is_new, None if state is None else requested, reason
    )
    finished = self.ruling.state.finished
    if is_new and state is not None and not finished:
      self._delivered(state, reason, drop.count)
    # Of a finished run, the member is notified by `Ended` alone.
    notified = state if drop.reason is not quorum.Reason.FINISHED else None
    for arrival in arrivals:
      message = arrival.message
      if notified is not None:
        dropped = msg.Dropped(message.sequence, reason, requested or 1, lease)
        self._out.notify(notified, dropped)
      self._out.note(
        journal_events.Drop(
          self.step,
          drop.replica,
          drop.local_step,
          message.count,
          reason,
          incarnation,
          message.batches or None,
          message.compute,
          self.policy.now - arrival.at,
          message.timings,
        )
      )

  def _start(self, start: quorum.StartRound) -> None:
    parts = self.gradients.parts(start.members)
    arrivals = self.gradients.of(c.incarnation for c in start.members)
    early = [arrival.message.early for arrival in arrivals]
    self.ruling.apply(
      *self.rounds.begin(start.step, start.round, parts, early, self.policy.now)
    )

  def reported(
    self, state: MemberState, message: msg.Done | msg.Failed
  ) -> None:
    """A member or a witness reports how a round has ended for it."""
    events = self.rounds.reported(state, message, self.policy.now)
    self.ruling.apply(*events)
    if isinstance(message, msg.Failed) and any(
      isinstance(event, quorum.Failed) for event in events
    ):
      other = self.rounds.strike(state, message)
      if other is None:
        return
      name = state.member.replica
      if self._config.rules.lower_on_loss:
        # The others can continue without the unreachable member. It pauses longer
        # before each rejoin, so evictions become rarer if the fault persists.
        why = f"replica {name!r} can't reach it: {message.reason}"
        self.consequences.append(Evict(other.member.incarnation, why))
      else:
        why = (
          f"replica {name!r} can't exchange with replica {other.member.replica!r},"
          f" and the step needs both: {message.reason}"
        )
        self._out.notify_all(self._members, msg.Stalled(self.step, 0.0, why))

  def _cancel_round(self) -> bool:
    """Ends the round without a commit; returns whether there was one."""
    for state in self._members:
      if state.applied > self.step:
        # This member's snapshot is to be of the next step, which won't be committed
        # now.
        state.server = None
    return self.rounds.end(cancel=True) is not None

  def _abandon(self, abandon: quorum.Abandon) -> None:
    if not self._cancel_round():
      return
    self._out.note(
      journal_events.Abandon(
        abandon.step,
        abandon.round,
        abandon.failed_replica,
        f"replica {abandon.failed_replica!r} could not do its part",
      )
    )

  def _commit(
    self, commit: quorum.Commit, tokens: dict[ReplicaId, int]
  ) -> None:
    ended = self.rounds.end(cancel=False)
    present = self.intake.of_connected(tokens)
    entry, arrivals = self.gradients.commit(commit, ended, present)
    if self._config.job.data is not None:
      tokens.clear()  # The commit itself says what members compute next.
    self._out.append(entry)
    self._out.notify_all(self._members, entry)
    timings = [a.message.timings for a in arrivals]
    self._out.note(journal_events.committed(entry, timings))
    self.intake.committed(max(a.message.compute or 0.0 for a in arrivals))
    self._committed(entry, ended.holders if ended is not None else ())

  def _committed(
    self, entry: Committed, holders: Iterable[Incarnation]
  ) -> None:
    """Keeps up with a step that has just been committed."""
    self._stall.end()
    if self.gradients.accepted:
      self._stall.begin(self.policy.now)
    step = entry.round.step
    for incarnation in holders:
      state = self._members.get(incarnation)
      if state is not None and state.applied == step:
        # The member has this mean, and the state before it, so it will soon have the
        # new state. A member with an older state may still lack an earlier mean.
        state.applied = step + 1
    for part in entry.parts:
      state = self._members.get(part.incarnation)
      if state is not None and state.leaving is not None:
        # The member asked to leave with a state that isn't the latest one any more.
        state.leaving = (step + 1, state.leaving[1])
    if self._is_sure(step + 1):
      self.rounds.announce_early(step + 1)

  def _is_sure(self, step: int) -> bool:
    """Whether the next step is the mean of one gradient of each member."""
    members = self._members
    return (
      self._config.needs_all
      and not self.ruling.state.finished
      and not self.gradients.accepted
      and 2 <= len(members) == quorum.needed(self.ruling.state)
      and all(
        s.is_connected and s.has(step) and s.leaving is None for s in members
      )
    )

  # Time.

  def _check_window(self, now: float) -> None:
    """Begins a step or closes it, if the policy says so."""
    policy, step = self.policy, self.step
    first = self.gradients.first
    if policy.begins(self.ruling.state, first):
      first = min(first, now)
      # Members with a gradient have waited since then; for a warning only the time from
      # now on counts.
      self._stall.begin(first, excused=now - first)
      self.intake.call(step)
    first = min(first, now)
    all_in = len(self.gradients.accepted) == len(self._members)
    if policy.closes(self.ruling.state, first, all_in):
      self.ruling.apply(quorum.Close(step))
    self.intake.announce()
