"""Steps of the run: gradients in, the quorum's decisions out.

    members -> Gradients   what is accepted   -> quorum.step -> decisions
            -> Rounds      what has its mean  -> quorum.step -> decisions
    decisions -> the log, then everybody

What a `Policy` decides, such as who computes on which samples, is only passed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, assert_never

from optax_dist import quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import notes
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.gradients import (
  Arrival,
  Gradients,
)
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.newcomers import (
  Newcomers,
  raises,
)
from optax_dist.coordinator.protocol.coordinator.not_finite import NotFinite
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.rounds import Rounds
from optax_dist.coordinator.protocol.coordinator.stall import Stall
from optax_dist.coordinator.protocol.entries import (
  Change,
  Committed,
  Details,
  Incarnation,
  Part,
  Process,
  ReplicaId,
  RoundId,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.ledger import Spans


class Evict(NamedTuple):
  """A member has to go."""

  incarnation: Incarnation
  reason: str
  wrong: bool = False


class Fail(NamedTuple):
  """The run can't go on."""

  reason: str
  error: Literal["CoordinatorError", "Diverged"] = "CoordinatorError"


class Finished(NamedTuple):
  """No more steps are taken."""

  reason: str = ""


Consequence: TypeAlias = Evict | Fail | Finished


class Steps:
  """Takes the steps of a run.

  Attributes:
    quorum: the state of the rules.
    gradients: those on their way into a step.
    rounds: the aggregation of a step.
    policy: decides what the rules don't.
    saving: whether all are to save the next state.
    is_ending: whether no more steps are taken.
    consequences: what the run has to do, in order; the run empties it.
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
    # Pending gradients of members may be this stale.
    late = config.rules.max_staleness
    self.quorum = config.quorum_state(history.step - late)
    self.gradients = Gradients(history.applied, history.dropped)
    self.rounds = Rounds(history.epoch, members, out)
    self.policy = config.make_policy(history.progress)
    self._stall = Stall(config.rules)
    self._not_finite = NotFinite(members, self.policy, out)
    self._newcomers = Newcomers()
    self.saving = self.is_ending = False
    # Hyperparameters to set with the next commit, by the process that asked.
    self._changes: dict[Process, Change] = {}
    self.consequences: list[Consequence] = []
    self._now = 0.0

  def begin(self, expected: bool) -> None:
    """Tells the rules of all replicas that the log knows.

    Args:
      expected: whether lost ones are expected back, as after a new beginning.
    """
    for replica, gone in self._history.departed.items():
      left = gone.left
      if expected and not left:
        continue
      self._silently(quorum.Join(replica))
      # While nobody is there, the quorum is not lowered to nobody.
      empty = not (left or self._members)
      departure = quorum.Lost if empty else self.departure(left)
      self._silently(departure(replica))
    for state in self._members:
      member = state.member
      self._silently(quorum.Join(member.replica, member.incarnation))
    self.quorum = dataclasses.replace(self.quorum, step=self._history.step)
    self.members_changed()

  def _silently(self, event: quorum.Event) -> None:
    self.quorum, _ = quorum.step(self.quorum, event)

  # The rules.

  @property
  def step(self) -> int:
    """The step that is taken next."""
    return self.quorum.step

  @property
  def has_state(self) -> bool:
    """Whether a member has the state that the next step is applied to.

    If gradients are sent inline, whoever has an older one gets the means.
    """
    inline = self._config.inline
    return inline or any(state.has(self.step) for state in self._members)

  def at(self, now: float) -> None:
    """Sets the time."""
    self._now = self.policy.now = now

  def apply(self, *events: quorum.Event) -> None:
    """Applies events to the rules, and does what they decide."""
    for event in events:
      self.quorum, decisions = quorum.step(self.quorum, event)
      self._decide(decisions)

  def deadlines(self) -> list[float]:
    """When `check` may find something."""
    return [
      self.policy.deadline,
      self.rounds.deadline(self._config.deadlines.attempt),
      *self._stall.deadlines(),
    ]

  def check(self) -> None:
    """Does what follows from the time, and from what was queued."""
    for incarnation in self._newcomers.due(self._waits_for_samples):
      self._count(incarnation)
    self._process_queued()
    self._check_verdicts()
    self._check_window()
    if self._now >= self.rounds.deadline(self._config.deadlines.attempt):
      self.rounds.repeat_early(self._now)
    self._check_stall()
    self._swap()
    self._not_finite.name_blocked(self.step)

  def end(self) -> None:
    """No more steps are taken."""
    self.is_ending = True
    self._stall.end()
    self.rounds.void_early()
    self.rounds.end(cancel=True)

  # Members.

  def joined(self, state: MemberState) -> None:
    """A replica has become a member."""
    self.rounds.void_early()
    member = state.member
    join = quorum.Join(member.replica, member.incarnation)
    if raises(self.quorum, join):
      self._newcomers.add(member.incarnation)
    else:
      self.apply(join)
    if self._config.rules.lower_on_loss:
      # The last one to go has not lowered the quorum, to nobody.
      for gone in self._history.lost():
        if gone.member.replica in self.quorum.replicas:
          self.apply(quorum.Leave(gone.member.replica))
    self.members_changed()

  def _count(self, incarnation: Incarnation, since: int | None = None) -> None:
    """Steps wait for a newcomer from now on.

    Args:
      incarnation: the newcomer.
      since: the step that its gradient is on, which it was given before it counted.
    """
    late = self._newcomers.remove(incarnation)
    state = self._members[incarnation]
    replica = state.member.replica
    self.apply(quorum.Join(replica, incarnation))
    if since is not None:
      known = self.quorum.replicas[replica]
      counts = {replica: known._replace(start=min(known.start, since))}
      self.quorum = dataclasses.replace(
        self.quorum, replicas=self.quorum.replicas | counts
      )
    self.members_changed()
    if late is not None:
      self.arrive(state, late)

  def _waits_for_samples(self, incarnation: Incarnation) -> bool:
    """Whether a newcomer has the state, but gets samples only once it counts."""
    state = self._members[incarnation]
    return self._config.job.data is not None and state.has(0)

  def reconnected(self, state: MemberState, lease: Spans) -> None:
    """A member has called, and computes on these samples."""
    known = self.quorum.replicas.get(state.member.replica)
    count = known.asked if known is not None else 0
    self.policy.claim(state.member.incarnation, lease, count)
    self._announce_asks()

  def removed(
    self,
    state: MemberState,
    departure: type[quorum.Leave] | type[quorum.Lost],
    changed: bool = True,
  ) -> None:
    """A member has left, is lost, or was replaced."""
    incarnation = state.member.incarnation
    self._newcomers.remove(incarnation)
    if len(self._newcomers) == len(self._members):
      # Nobody else is left.
      for newcomer in self._members:
        self._count(newcomer.member.incarnation)
    self.gradients.dismiss(incarnation)
    self.rounds.void_early()
    # First, or a witness that is gone might let a step begin with its gradient.
    self.apply(departure(state.member.replica, incarnation))
    self.apply(*self.rounds.lost(incarnation))
    keep: Spans = ()
    if self.rounds.current is not None:
      for part in self.rounds.current.message.parts:
        if part.incarnation == incarnation:
          keep = part.data  # It has done its part, and may still be committed.
    self.policy.removed(incarnation, keep)
    self._announce_asks()
    if changed:
      self.members_changed()
    self._stall.removed(incarnation, bool(self.gradients.accepted))

  @property
  def never_came(self) -> int:
    """How many replicas are known not to come, of those that never joined."""
    known = self.quorum.replicas.values()
    return sum(r.incarnation < 0 and not r.live for r in known)

  def never_joined(self, replicas: Iterable[ReplicaId]) -> None:
    """Counts replicas as lost that have died before they joined."""
    for replica in replicas:
      # Of any other the log says what it is.
      if replica not in self.quorum.replicas:
        self.apply(self.departure(False)(replica))
        self.members_changed()

  def set_hyperparams(self, change: Change) -> None:
    """Sets them with the next commit, unless a commit has done so."""
    process = change.process
    known = self._changes.get(process)
    latest = (
      self._history.changes.get(process, 0) if known is None else known.number
    )
    if change.number > latest:
      # The latest request is the last one, and has the earlier values.
      self._changes.pop(process, None)
      self._changes[process] = change

  def departure(self, left: bool) -> type[quorum.Leave] | type[quorum.Lost]:
    """How the departure of a replica counts for the quorum."""
    counts_as_left = left or self._config.rules.lower_on_loss
    return quorum.Leave if counts_as_left else quorum.Lost

  def members_changed(self) -> None:
    """The quorum may be another one."""
    lost = len(self._history.lost())
    self.policy.members_changed(self.quorum, lost)
    self._announce_asks()

  def _announce_asks(self) -> None:
    """Tells members what to compute next, unless another message has."""
    for ask in self.policy.announcements():
      state = self._members.get(ask.incarnation)
      if state is None:
        continue
      arrival = self.gradients.accepted.get(ask.incarnation)
      inside = -1 if arrival is None else arrival.message.sequence
      asked = msg.Asked(self.step, inside, ask.gradients, ask.lease)
      self._out.tell(state, asked)

  def _tokens_of_connected(
    self, tokens: dict[ReplicaId, int]
  ) -> dict[Incarnation, int]:
    """The tokens of members that are connected."""
    if not tokens:
      return {}
    states = {state.member.replica: state for state in self._members}
    found = {}
    for replica, count in tokens.items():
      state = states.get(replica)
      if state is not None and state.is_connected:
        found[state.member.incarnation] = count
    return found

  # Gradients.

  def arrive(self, state: MemberState, message: msg.Arrive) -> None:
    """A member submits a gradient, which may have to wait."""
    if not state.needs:
      state.applied = max(state.applied, message.applied)
    if self._may_process(state, message):
      self._arrive(state, message)
    else:
      self.gradients.queue(state.member.incarnation, message)

  def _arrive(self, state: MemberState, message: msg.Arrive) -> None:
    incarnation, replica = state.member.incarnation, state.member.replica
    why = self._refusal(state, message)
    if why:
      self.reject(state.member.process, why)
      return
    if incarnation in self._newcomers:
      if self._begins_later(incarnation, message):
        return
      self._count(incarnation, message.local_step)
    state.sequence = message.sequence
    local_step = message.local_step
    held = self.quorum.inside.get(replica)
    inside = held.count if held and held.local_step == local_step else 0
    if inside + message.count != message.total:
      # A sum whose first part was decided separately in the meantime: of no
      # step, and too old at the first one already.
      local_step = -1 - self._config.rules.max_staleness
    fresh = quorum.accepts(
      local_step, self.step, self._config.rules.max_staleness
    )
    finite = is_finite = self.policy.is_finite(incarnation, message)
    if fresh and finite:
      # For the rules, a gradient on another replica's samples is as bad as NaN.
      finite = self.policy.fits(incarnation, message)
      found, expected = len(message.payload), 0
      if finite:
        before = self.policy.data(incarnation) if inside else ()
        expected = self._config.inline_size((*before, *message.data))
      if finite and found != expected:
        why = f"it sent a gradient of {found:,} bytes, not {expected:,}"
        self.consequences.append(Evict(incarnation, why))
        return
    event = quorum.Arrive(
      replica, local_step, finite, incarnation, message.count
    )
    self.quorum, decisions = quorum.step(self.quorum, event)
    arrival = Arrival(incarnation, message, self._now, is_finite)
    self._decide(decisions, arrival)

  def _begins_later(
    self, incarnation: Incarnation, message: msg.Arrive
  ) -> bool:
    """Whether a newcomer's gradient is too late, and it begins with the others."""
    most, live = self._config.rules.max_staleness, self.quorum.live
    return (
      not quorum.accepts(message.local_step, self.step, most)
      and self._config.policy is None  # Its learners don't wait for each other.
      and self._newcomers.wait(incarnation, message, live, self._now)
    )

  def _refusal(self, state: MemberState, message: msg.Arrive) -> str:
    """What is wrong with a submission; "" for nothing."""
    if message.sequence <= state.sequence or message.count > message.total:
      return "a submission out of order"
    if message.local_step > self.step:
      return "a gradient for a future step"
    return self.policy.admit(state.member.incarnation, message)

  def reject(self, peer: Process, error: str) -> None:
    """Tells a process that a message was invalid."""
    self._out.send(peer, msg.Rejected(error))

  def _may_process(self, state: MemberState, message: msg.Arrive) -> bool:
    """Whether the rules may get a gradient now; otherwise it is queued."""
    if not self._all_connected():
      return False
    if not self.has_state:
      return False  # There is nothing that the mean could be applied to.
    if self._config.rules.alone:
      # Two that arrive meanwhile would be averaged, not applied one by one.
      return self.rounds.current is None
    round_ = self.quorum.attempt
    # If the round fails, the sum that it extends is accepted again.
    return (
      round_ is None
      or message.count == message.total
      or state.member.replica not in round_.incarnations
    )

  def _process_queued(self) -> None:
    """Gives queued gradients to the rules, in order, as far as possible."""
    while (queued := self.gradients.queued) is not None:
      incarnation, message = queued
      state = self._members[incarnation]  # `dismiss` removes others.
      if not self._may_process(state, message):
        return
      self.gradients.unqueue()
      self._arrive(state, message)

  def _all_connected(self) -> bool:
    """Whether all members have called this coordinator, or had time to.

    One that has yet to call may be the only one with the state, or with steps that
    the log has lost; and with a single gradient, another one gets the mean too.
    """
    return all(state.is_connected for state in self._members.waiting())

  # Decisions.

  def _decide(
    self,
    decisions: Sequence[quorum.Decision],
    arriving: Arrival | None = None,
  ) -> None:
    """Does what the rules have decided, about a gradient that has come if any."""
    tokens = {
      d.replica: d.count for d in decisions if isinstance(d, quorum.Token)
    }
    for decision in decisions:
      match decision:
        case quorum.Token() | quorum.Wait() | quorum.Refuse():
          pass
        case quorum.Accept():
          assert arriving is not None
          self._accept(arriving)
        case quorum.Drop():
          self._drop(decision, tokens, arriving)
        case quorum.StartAttempt():
          self._start(decision)
        case quorum.Abandon():
          self._abandon(decision)
        case quorum.Commit():
          self._commit(decision, tokens)
        case quorum.CannotProceed():
          self._cannot_proceed(decision)
        case quorum.Finished():
          self.consequences.append(Finished())
          return
        case _:
          assert_never(decision)
    for incarnation, count in self._tokens_of_connected(tokens).items():
      self.policy.ask(incarnation, count)
    self._announce_asks()

  def _accept(self, arriving: Arrival) -> None:
    incarnation, message = arriving.incarnation, arriving.message
    self.gradients.accepted[incarnation] = arriving
    self._members[incarnation].not_finite = 0
    if self.policy.accepted(incarnation, message):
      self._request_gradients(message.local_step)
    waits = self.policy.has_begun(message.local_step)
    if self._stall.since is None and waits:
      self._stall.begin(self._now)

  def _delivered(self, state: MemberState, reason: str, count: int) -> None:
    """A member has delivered what was dropped."""
    member = state.member
    self._stall.dropped(
      member.incarnation, member.replica, reason, count, self._now
    )
    if self.policy.has_begun(self.step):
      self._stall.waits()
    if reason == quorum.Reason.NON_FINITE:
      self._not_finite.delivered(state, count, self.step)

  def _swap(self) -> None:
    """Has a member try samples on which others' gradients were not finite."""
    if self.rounds.current is not None or self.is_ending:
      return
    incarnation = self.policy.swap()
    state = None if incarnation is None else self._members.get(incarnation)
    if state is not None:
      self.apply(quorum.Return(state.member.replica, state.member.incarnation))

  def _request_gradients(self, step: int) -> None:
    """Calls all members that have no gradient in a step that begins."""
    others = [
      state
      for state in self._members
      if state.member.incarnation not in self.gradients.accepted
    ]
    self._out.tell_all(others, msg.Call(step))

  def _drop(
    self,
    drop: quorum.Drop,
    tokens: dict[ReplicaId, int],
    arriving: Arrival | None,
  ) -> None:
    # Who has begun the early round waits for this one.
    self.rounds.void_early()
    incarnation = drop.incarnation
    arrival, reason = self.gradients.drop(drop, arriving)
    is_new = arrival is arriving
    state = self._members.get(incarnation)
    asked = tokens.pop(drop.replica, None)
    lease: Spans = ()
    if arrival is not None:
      token = asked if incarnation in self._members else None
      lease = self.policy.dropped(
        incarnation, arrival.message, is_new, token, reason
      )
      if is_new and state is not None and not self.is_ending:
        self._delivered(state, reason, drop.count)
    # That the run has finished is told by its end alone.
    ends = drop.reason is quorum.Reason.FINISHED
    if state is not None and arrival is not None and not ends:
      message = arrival.message
      whole = not is_new or message.count == message.total
      count, sequence = asked or 1, message.sequence
      self._out.tell(state, msg.Dropped(sequence, reason, count, lease, whole))
    self._out.note(
      notes.Drop(
        self.step,
        drop.replica,
        drop.local_step,
        drop.count,
        reason,
        incarnation,
        arrival.message.batches or None if arrival else None,
        arrival.message.compute if arrival else None,
        self._now - arrival.at if arrival else None,
        arrival.message.timings if arrival else None,
      )
    )

  def _parts(self, members: Iterable[quorum.Contribution]) -> tuple[Part, ...]:
    parts = tuple([self._part(c) for c in members])
    arrived = [self.gradients.accepted[p.incarnation].message for p in parts]
    return self.policy.weigh(parts, arrived)

  def _part(self, c: quorum.Contribution) -> Part:
    return Part(
      c.incarnation,
      c.replica,
      self.gradients.accepted[c.incarnation].message.sequence,
      c.local_step,
      c.staleness,
      c.count,
      c.weight,
      self.policy.data(c.incarnation),
    )

  def _start(self, start: quorum.StartAttempt) -> None:
    parts = self._parts(start.members)
    accepted = self.gradients.accepted
    early = [accepted[part.incarnation].message.early for part in parts]
    self.apply(
      *self.rounds.begin(start.step, start.attempt, parts, early, self._now)
    )

  def reported(
    self, state: MemberState, message: msg.Done | msg.Failed
  ) -> None:
    """A member or a witness says how a round has ended for it."""
    events = self.rounds.reported(state, message, self._now)
    self.apply(*events)
    if isinstance(message, msg.Failed) and any(
      isinstance(event, quorum.Failed) for event in events
    ):
      pair = self.rounds.strike(state, message)
      if pair is not None and self._config.rules.lower_on_loss:
        # The others can continue without it; it pauses longer each time before it
        # rejoins, so the two don't replace each other indefinitely.
        one, other = pair
        name = one.member.replica
        why = f"replica {name!r} can't reach it: {message.reason}"
        self.consequences.append(Evict(other.member.incarnation, why))

  def _abandon(self, abandon: quorum.Abandon) -> None:
    if self.rounds.end(cancel=True) is None:
      return
    self._out.note(
      notes.Abandon(
        abandon.step,
        abandon.attempt,
        abandon.failed_replica,
        f"replica {abandon.failed_replica!r} could not do its part",
      )
    )
    for state in self._members:
      # A snapshot may wait for a step that won't be committed now.
      state.server = None

  def _commit(
    self, commit: quorum.Commit, tokens: dict[ReplicaId, int]
  ) -> None:
    ended = self.rounds.end(cancel=False)
    if ended is None:
      parts = self._parts(commit.members)
      id_ = RoundId(self._history.epoch, commit.step, commit.attempt)
      seconds = 0.0
    else:
      parts, id_ = ended.message.parts, ended.id
      seconds = self._now - ended.began
    arrivals = self.gradients.commit(parts)
    details = tuple(
      [
        # Microseconds: with hundreds of members each digit counts.
        Details(
          a.message.batches, a.message.compute, round(self._now - a.at, 6)
        )
        for a in arrivals
      ]
    )
    dropped = tuple(sorted(self.gradients.dropped.items()))
    present = self._tokens_of_connected(tokens)
    following = self.policy.committed(parts, present, seconds)
    if following is not None:
      tokens.clear()
    leases, skipped = following or ((), ())
    mean = None
    if self._config.inline:
      assert self._config.average is not None
      payloads = [a.message.payload for a in arrivals]
      mean = self._config.average(parts, payloads)
    entry = Committed(
      id_,
      parts,
      mean,
      self.saving,
      details,
      dropped,
      leases,
      skipped,
      tuple(self._changes.values()),
    )
    self.saving = False
    self._changes.clear()
    self._out.append(entry)
    self._out.tell_all(self._members, entry)
    timings = [a.message.timings for a in arrivals]
    self._out.note(notes.committed(entry, timings))
    self._committed(entry, ended.holders if ended is not None else ())

  def _committed(
    self, entry: Committed, holders: Iterable[Incarnation]
  ) -> None:
    """Keeps up with a step that has just been committed."""
    self._stall.end()
    if self.gradients.accepted:
      self._stall.begin(self._now)
    self.rounds.committed()
    self._newcomers.committed(self._now)
    step = entry.round.step
    for incarnation in holders:
      state = self._members.get(incarnation)
      if state is not None and state.applied == step:
        # It has the mean, and will soon have the state. With a gradient of an
        # older step it may still lack an earlier mean.
        state.applied = step + 1
    for part in entry.parts:
      state = self._members.get(part.incarnation)
      if state is not None and state.leaving is not None:
        # The state it wanted to leave with isn't the last one any more.
        state.leaving = (step + 1, state.leaving[1])
    if self._is_sure(step + 1):
      self.rounds.announce_early(step + 1)

  def _is_sure(self, step: int) -> bool:
    """Whether the next step is the mean of one gradient of each member."""
    members = self._members
    return (
      self._config.needs_all
      and not self.quorum.finished
      and not self.gradients.accepted
      and 2 <= len(members) == quorum.needed(self.quorum)
      and all(
        s.is_connected and s.has(step) and s.leaving is None for s in members
      )
    )

  # Time.

  def _check_verdicts(self) -> None:
    """Evicts members whose gradients were found to be wrong."""
    verdict = self.policy.verdict()
    if verdict is None:
      return
    states = {i: self._members[i] for i in verdict.digests}
    names = [state.member.replica for state in states.values()]
    wrong = [states[i].member.replica for i in verdict.wrong]
    digests = {
      str(states[i].member.replica): d for i, d in verdict.digests.items()
    }
    slot = verdict.slot
    self._out.note(notes.Audit(self.step, slot, digests, wrong))
    what = f"gradient of micro-batch {slot} of step {self.step}"
    others = [name for name in names if name not in wrong]
    why = f"its {what} is not what replicas {others} have computed"
    self.consequences += [Evict(i, why, wrong=True) for i in verdict.wrong]
    if not wrong:
      self.consequences.append(
        Fail(
          f"Replicas {names} have computed different values of the {what}, and"
          " no other replica is left to decide which is wrong. Resume from the"
          " last checkpoint with three replicas, which can."
        )
      )

  def _check_window(self) -> None:
    """Begins a step that no gradient has begun, and closes one that is over."""
    policy, step = self.policy, self.step
    first = self.gradients.first
    here = len(self.gradients.accepted) == len(self._members)
    if policy.begins(self.quorum, first, here):
      first = min(first, self._now)
      # Its members have waited since they contributed; others only from now on.
      self._stall.begin(first, excused=self._now - first)
      self._request_gradients(step)
    first = min(first, self._now)
    if policy.closes(self.quorum, first):
      self.apply(quorum.Close(step))
    self._announce_asks()

  def _check_stall(self) -> None:
    found, step = self._stall.check(self._now), self.step
    if found is None:
      return
    waited, too_long = found
    text = self._stall.text(self.quorum)
    if too_long:
      why = f"Step {step} made no progress for {waited:.1f} s: {text}."
      self.consequences.append(Fail(why))
    else:
      missing = quorum.missing(self.quorum)
      counts = self._stall.counts() or None
      self._out.note(notes.Stall(step, waited, missing._asdict(), counts))
      self._out.tell_all(self._members, msg.Stalled(step, waited, text))

  def _cannot_proceed(self, decision: quorum.CannotProceed) -> None:
    self._out.note(
      notes.CannotProceed(
        decision.step,
        decision.have,
        decision.needed,
        list(decision.missing),
        decision.final,
      )
    )
    if decision.final:
      self.consequences.append(Fail(f"The run cannot go on: {decision}"))
    else:
      stalled = msg.Stalled(decision.step, 0.0, str(decision))
      self._out.tell_all(self._members, stalled)
