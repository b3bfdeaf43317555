"""The leader: messages in, the quorum's decisions out; never a large gradient.

Any replica can be leader. Nothing is lost with it: what counts is in the log,
and the next leader asks all members to submit again. TensorFlow calls it chief.

    messages -> Candidates, Roster   who is a member
             -> Gradients            what is accepted  -> quorum.step -> decisions
             -> Aggregation          what has its mean -> quorum.step -> decisions
    decisions -> LogWriter -> the log -> Publisher -> followers
              -> Outbox, held back until they are in the log

Beside them `Snapshots` gives members the state, `Stall` times a step, `Ending`
waits for those behind, and `Succession` and `Heartbeat` look after leadership.
What a `Policy` decides, such as who computes on which samples, the leader only
passes on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

from optax_dist import quorum
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import notes, optimistic
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Change,
  Committed,
  Details,
  Ended,
  Incarnation,
  Joined,
  Member,
  Part,
  Process,
  Record,
  Removed,
  ReplicaId,
  Term,
)
from optax_dist.coordinator.protocol.inputs import Input
from optax_dist.coordinator.protocol.leader import candidates
from optax_dist.coordinator.protocol.leader.attempt import (
  Aggregation,
  announcement,
)
from optax_dist.coordinator.protocol.leader.candidates import Candidates
from optax_dist.coordinator.protocol.leader.ending import Ending
from optax_dist.coordinator.protocol.leader.gradients import Arrival, Gradients
from optax_dist.coordinator.protocol.leader.heartbeat import Heartbeat
from optax_dist.coordinator.protocol.leader.outbox import Outbox
from optax_dist.coordinator.protocol.leader.publisher import Publisher
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster
from optax_dist.coordinator.protocol.leader.snapshots import Snapshots
from optax_dist.coordinator.protocol.leader.stall import Stall
from optax_dist.coordinator.protocol.leader.succession import Succession
from optax_dist.coordinator.protocol.log import (
  TOLD,
  Appended,
  Count,
  LogWriter,
  Trimmer,
)
from optax_dist.coordinator.protocol.membership import View
from optax_dist.ledger import Spans

# Replicas this far behind are asked for their step.
_ASK_LAG = 4
# Bytes of all means in a record: a store takes 1 MiB, of which half is for texts.
_MOST_MEANS = 256 << 10
# Gradients in a row of a member that are not finite, after which that is said.
_SAID_NOT_FINITE = tuple(3 * 10**n for n in range(9))
# Messages after which a member waits as before.
_WAIT_NO_LESS = frozenset((msg.Arrive, msg.Done))


class Leader:
  """One term of leadership.

  Attributes:
    term: its number.
    over: why it has ended: another process is leader, this one has left, or the
      store doesn't answer; "" if it hasn't.
  """

  def __init__(
    self,
    config: Config,
    view: View,
    position: int,
    records: Sequence[Record],
    count: Count,
  ):
    """Creates the leader of a `Term` that is in the log.

    Args:
      config: configuration of its process.
      view: the decisions in the log, the `Term` included.
      position: position of the `Term`.
      records: the latest records, that of the `Term` as the last one.
      count: numbers requests to the store.
    """
    self._config = config
    self._limits = config.deadlines
    self.term, self.over = view.term, ""
    self._view = view
    self._now, self._due = 0.0, math.inf
    self._log = LogWriter(view.term, position + 1, count)
    self._out = Outbox(self._log)
    self._trimmer = Trimmer(config.block, count)
    self._publisher = Publisher(position, records[-1], config.block)
    self._read = tuple(enumerate(records, position + 1 - len(records)))
    self._roster = Roster()
    self._next_incarnation = view.next_incarnation
    self._quorum = config.quorum_state(view.step)
    self._policy = config.leader_policy(view.progress)
    lost = {replica for replica, left in view.departed.items() if not left}
    self._candidates = Candidates(lost)
    self._gradients = Gradients(view.applied, view.dropped)
    self._snapshots = Snapshots(
      config.process, view.term, self._roster, self._out
    )
    self._succession = Succession(config.process, self._roster, self._out)
    self._aggregation = Aggregation(self._roster, self._out)
    # Processes whose gradients are wrong, and what was found.
    self._wrong: dict[Process, str] = {}
    self._saving = False
    # Hyperparameters to set with the next commit, by the process that asked.
    self._changes: dict[Process, Change] = {}
    # The number of each process's last one in this term.
    self._requests: dict[Process, int] = {}
    self._prints: dict[int, tuple[str, ReplicaId]] = {}
    self._stall = Stall(config)
    # Members with gradients that are not finite, of which nothing was said yet.
    self._unnamed: set[Incarnation] = set()
    self._ending = Ending()
    self._heartbeat = Heartbeat(config, view.term, count)
    self._bad = 0

  def begin(self, now: float) -> list[Effect]:
    """Announces its leadership to members, and asks for pending requests."""
    self._now = self._policy.now = now
    config, view, recorded = self._config, self._view, self._publisher.oldest
    (term,) = recorded.record.entries
    assert isinstance(term, Term)
    recent = [
      notes.committed(entry)
      for _, record in self._read
      for entry in record.entries
      if isinstance(entry, Committed)
    ]
    self._out.add(fx.LeadershipChanged(True, tuple(recent)))
    if term.fresh:
      self._out.note(notes.Run(notes.VERSION, "", view.step))
    self._out.note(notes.Leader(config.replica, view.step, view.term))
    if view.membership == recorded.position:
      # Its membership began with its term, and has no `Joined` entry.
      joined = notes.Join(
        config.replica, view.step, term.incarnation, config.address
      )
      self._out.note(joined)
    # Pending gradients of members may be this stale.
    late = config.max_staleness
    self._quorum = dataclasses.replace(self._quorum, step=view.step - late)
    for replica, left in view.departed.items():
      if term.fresh and not left:
        self._candidates.expect(replica, now + self._limits.pace)
        continue
      self._quorum, _ = quorum.step(self._quorum, quorum.Join(replica))
      self._quorum, _ = quorum.step(
        self._quorum, self._departure(left)(replica)
      )
    for member in list(view.members.values()):
      until = now + self._limits.pace
      self._roster.add(MemberState(member, until))
      join = quorum.Join(member.replica, member.incarnation)
      self._quorum, _ = quorum.step(self._quorum, join)
      if member.process != config.process:
        self._out.add(fx.Connect(member.process, member.address))
      # It may lack the record before, too, and not reach the store.
      for at, record in self._read[-TOLD:]:
        self._out.send(member.process, msg.Recorded(at, record))
    self._quorum = dataclasses.replace(self._quorum, step=view.step)
    self._members_changed()
    return self._finish_step()

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects, in order."""
    self._now = self._policy.now = now
    if not self.over:
      self._handle(input_)
    return self._finish_step()

  def resign(self) -> list[Effect]:
    """Another process is known to be leader: tells the followers."""
    if not self.over:
      self._resign("another process is leader")
    self._due = math.inf
    return self._out.take()

  def _finish_step(self) -> list[Effect]:
    if not self.over:
      self._proceed()
      self._flush()
    self._roster.waiting()  # So that equal states compare equal.
    self._due = self._deadline()
    return self._out.take()

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    return self._due

  def _deadline(self) -> float:
    if self.over:
      return math.inf
    config = self._config
    times = [self._heartbeat.due]
    if self._log.record is not None:
      times.append(self._log.since + self._limits.pace)
    times += self._candidates.deadlines()
    if self._ending.is_decided:
      return min(times)
    times.append(self._policy.deadline)
    attempt = self._aggregation.attempt
    if attempt is not None:
      times.append(attempt.due(self._limits))
    times += self._stall.deadlines()
    lacking_since = self._snapshots.lacking_since
    if lacking_since is not None:
      wait = self._limits.pace if self._is_untouched else config.timeout
      times.append(lacking_since + wait)
    if self._ending.since is not None:
      times.append(self._ending.since + self._limits.patience)
    for state in self._roster.waiting():
      times.append(state.until)
      if state.leaving is not None:
        times.append(state.leaving[1] + self._limits.patience)
    return min(times)

  def _handle(self, input_: Input) -> None:
    match input_:
      case ins.Received(peer, message):
        if type(message) not in _WAIT_NO_LESS:
          self._roster.changed()
        self._receive(peer, message)
      case ins.Malformed(peer, error):
        self._reject(peer, error)
      case ins.PeerLost(peer, _, reason):
        self._publisher.drop(peer)
        self._candidates.gone(peer)
        state = self._roster.of_process(peer)
        if state is not None:
          self._remove(state, f"its connection was lost: {reason}")
      case ins.PutAnswered():
        self._out.add(*self._trimmer.answered(input_, self._view.terms))
        self._logged(input_)
      case ins.GetAnswered():
        self._logged(input_)
      case _:
        pass  # Handled by the follower.

  def _receive(self, peer: Process, message: msg.Message) -> None:
    if isinstance(message, msg.Hello):
      self._hello(peer, message)
      return
    if self._ending.is_decided and isinstance(message, msg.NeedsSnapshot):
      address = self._publisher.followers.get(peer)
      step = self._quorum.step
      if address is None or not self._snapshots.serve_the_end(
        peer, address, step
      ):
        # Not before it knows of the end: it would only call again.
        self._out.hold(fx.Send(peer, msg.NotLeader()))
      return
    state = self._roster.of_process(peer)
    if state is None or not state.is_connected:
      return  # It is no longer a member, or not yet one of this term.
    match message:
      case msg.Arrive():
        if self._ending.is_decided:
          pass  # It is resolved when its replica reads that the run has ended.
        elif self._may_count(state, message):
          self._arrive(state, message)
        else:
          self._gradients.queue(state.member.incarnation, message)
      case msg.Done() | msg.Failed():
        self._reported(state, message)
      case msg.Applied(step):
        state.has_applied(step)
      case msg.NeedsSnapshot(step):
        state.needs, state.applied = True, step
        if state.server is not None:
          state.tried.add(state.server)
          state.server = None
      case msg.Leave(lost, reason, stacks):
        if lost:
          if stacks:
            self._note_stuck(state, reason, stacks)
          self._remove(state, reason)
        elif state.leaving is None:
          state.leaving = (self._quorum.step, self._now)
      case msg.Finish(reason):
        if not self._ending.has_begun:
          self._ending.reason = reason
          self._step(quorum.Finish())
      case msg.Save():
        self._saving = True
      case msg.NeverJoined(replicas):
        self._never_joined(replicas)
      case msg.SetHyperparams(number, values):
        known = self._view.changes.get(peer, 0)
        if number > self._requests.get(peer, known):
          self._requests[peer] = number
          # The latest request is the last one, and has the earlier values.
          self._changes.pop(peer, None)
          self._changes[peer] = Change(peer, number, values)
      case msg.Fingerprint():
        self._fingerprint(state, message)
      case _:
        self._reject(peer, f"{type(message).__name__} is not for a leader")

  def _reject(self, peer: Process, error: str) -> None:
    self._bad += 1
    text = f"bad message {self._bad}, of {peer}: {error}"
    self._out.add(fx.Log("warning", text))
    self._out.send(peer, msg.Rejected(error))

  # The log.

  def _logged(self, answer: ins.PutAnswered | ins.GetAnswered) -> None:
    result = self._log.answered(answer)
    if isinstance(result, Appended):
      self._appended(result)
    elif result is not None:
      self._out.add(result)
    elif self._log.deposed:
      self._resign("another process is leader")

  def _appended(self, done: Appended) -> None:
    """Sends a record that is in the log, and the effects held back for it."""
    members = dict(self._view.members)
    gone: list[Process] = []
    left = False
    for entry in done.record.entries:
      if isinstance(entry, Joined):
        members[entry.member.incarnation] = entry.member
      elif isinstance(entry, Removed):
        process = members[entry.incarnation].process
        gone.append(process)
        left = left or (entry.left and process == self._config.process)
    before = self._view.step
    self._view.apply(done.position, done.record)
    if self._view.step > before:
      self._ending.step_logged(self._now)
    self._out.add(*self._publisher.append(done.position, done.record))
    self._out.add(*done.effects)
    for peer in gone:
      if self._roster.of_process(peer) is None:
        self._publisher.drop(peer)
        if peer != self._config.process:
          self._out.add(fx.Disconnect(peer, "it is a member no more"))
    if left:
      self._resign("it has left")
    untouched = self._view.untouched
    self._out.add(*self._trimmer.trim(self._log.position, untouched))
    if self._view.ended is not None:
      self._ending.is_decided = True

  def _flush(self) -> None:
    put = self._log.flush(self._now)
    if put is not None:
      self._out.add(put)

  def _stream(self, peer: Process, hello: msg.Hello, incarnation: int) -> None:
    """Starts to send the log to a process."""
    end, view = self._log.position, self._view
    self._out.add(*self._publisher.follow(peer, hello, incarnation, end, view))

  def _resign(self, why: str) -> None:
    self.over = why
    self._out.add(*self._publisher.to_all(msg.NotLeader()))

  def _step(self, *events: quorum.Event) -> None:
    if self._ending.is_decided:
      return  # With an error, steps might still be committed.
    for event in events:
      self._quorum, decisions = quorum.step(self._quorum, event)
      self._decide(decisions)

  # Members.

  def _hello(
    self, peer: Process, hello: msg.Hello, waited: bool = False
  ) -> None:
    why = candidates.difference(self._config.agreement, hello)
    why = why or self._wrong.get(peer, "")
    if why:
      self._out.send(peer, msg.Refused(why))
      return
    if hello.position > self._log.position:
      self._out.send(peer, msg.NotLeader())
      return  # It has read more than this leader has put.
    state = self._roster.of_process(peer)
    if state is not None:
      state.store_delay = hello.store_delay
    known = state is not None and state.member.incarnation == hello.incarnation
    if state is not None and known and not state.is_connected:
      self._come(state, peer, hello)
      self._ask_again(state, hello.lease)
      return
    if self._ending.has_begun:
      # No replica joins any more, but a member that calls again remains one,
      # since the end waits for its state; others read of the end.
      if state is not None and state.member.replica == hello.replica:
        self._come(state, peer, hello)
      else:
        self._stream(peer, hello, -1)
      return
    oldest = self._publisher.oldest.position
    if state is None and self._candidates.has_left(hello, oldest):
      self._stream(peer, hello, hello.incarnation)
      return  # It will read that it has left; if admitted, it would be lost.
    rival = self._roster.of_replica(hello.replica)
    rivals = self._publisher.followers.keys() - {peer}
    if not waited and rival is not None and rival.member.process in rivals:
      # Most likely one of the two is dead, which will be detected.
      self._candidates.wait(peer, hello, self._now + self._limits.pace)
      return
    if state is not None and state.member.replica != hello.replica:
      self._remove(state, "its process has joined as another replica")
    incarnation = self._next_incarnation
    self._stream(peer, hello, incarnation)
    self._admit(Member(incarnation, hello.replica, peer, hello.address))
    self._roster[incarnation].store_delay = hello.store_delay
    self._succession.look()

  def _come(self, state: MemberState, peer: Process, hello: msg.Hello) -> None:
    """Handles a member that connects to this leader, possibly again."""
    state.comes(hello.applied)
    self._roster.changed()
    self._stream(peer, hello, state.member.incarnation)
    self._succession.look()

  def _hand_over(self) -> None:
    """Hands leadership to a member nearer to the store, if nothing is pending."""
    # The gradients of an attempt are among the accepted ones.
    busy = self._gradients.accepted or self._log.pending
    if not busy and not self._ending.has_begun:
      inline, step = self._config.inline, self._quorum.step
      self._succession.hand_over(None if inline else step)

  def _ask_again(self, state: MemberState, lease: Spans) -> None:
    known = self._quorum.replicas.get(state.member.replica)
    count = known.asked if known is not None else 0
    self._policy.claim(state.member.incarnation, lease, count)
    self._announce_asks()

  def _admit(self, member: Member) -> None:
    old = self._roster.of_replica(member.replica)
    # First, since what follows from it is sent once it is in the log.
    self._log.add(Joined(member))
    if old is not None:
      # The entry `Joined` removes it.
      self._roster.remove(old.member.incarnation)
      self._note_removed(old, False, "replaced")
      self._dismiss(old.member.incarnation)
      self._step(quorum.Lost(member.replica, old.member.incarnation))
      self._reclaim(old.member.incarnation)
    self._candidates.joined(member.replica)
    for state in self._roster.waiting():
      if state.leaving is not None:  # It may have what this one needs.
        state.leaving = state.leaving[0], self._now
    self._next_incarnation += 1
    self._roster.add(MemberState(member))
    self._out.note(
      notes.Join(
        member.replica,
        self._quorum.step,
        member.incarnation,
        member.address,
      )
    )
    self._step(quorum.Join(member.replica, member.incarnation))
    self._members_changed()

  def _remove(
    self, state: MemberState, reason: str, left: bool = False
  ) -> None:
    """Removes a member that has left, or is lost."""
    incarnation, replica = state.member.incarnation, state.member.replica
    if not self._roster.remove(incarnation) or self._ending.is_decided:
      return
    self._candidates.removed(state, left)
    self._log.add(Removed(incarnation, left, reason))
    self._note_removed(state, left, reason)
    self._dismiss(incarnation)
    # The quorum is not lowered to nobody while a lost replica may come back: the
    # run would end well.
    last = not self._roster and bool(self._candidates.lost)
    departure = quorum.Lost if last else self._departure(left)
    self._step(departure(replica, incarnation))
    self._reclaim(incarnation)
    self._members_changed()
    self._stall.removed(incarnation, bool(self._gradients.accepted))

  def _departure(self, left: bool) -> type[quorum.Leave] | type[quorum.Lost]:
    """How the departure of a replica counts for the quorum."""
    counts_as_left = left or self._config.lower_on_loss
    return quorum.Leave if counts_as_left else quorum.Lost

  def _stop_expecting(self) -> None:
    """Gives up replicas that did not rejoin after a fresh start."""
    for replica in self._candidates.overdue(self._now):
      self._quorum, _ = quorum.step(self._quorum, quorum.Join(replica))
      self._step(self._departure(False)(replica))
      self._members_changed()

  def _never_joined(self, replicas: Iterable[ReplicaId]) -> None:
    """Counts replicas as lost that have died before they joined."""
    for replica in replicas:
      # Of any other the log says what it is.
      if replica not in self._quorum.replicas:
        self._step(self._departure(False)(replica))
        self._members_changed()

  # What members compute next.

  def _members_changed(self) -> None:
    lost = len(self._candidates.lost)
    self._policy.members_changed(self._quorum, lost)
    self._announce_asks()

  def _reclaim(self, incarnation: Incarnation) -> None:
    """Returns the samples of a removed member to the pool."""
    keep: Spans = ()
    if self._aggregation.attempt is not None:
      for part in self._aggregation.attempt.message.parts:
        if part.incarnation == incarnation:
          keep = part.data  # It has done its part, and may still be committed.
    self._policy.removed(incarnation, keep)
    self._announce_asks()

  def _announce_asks(self) -> None:
    """Tells members what to compute next, unless another message has."""
    for ask in self._policy.announcements():
      state = self._roster.get(ask.incarnation)
      if state is None or not state.is_connected:
        continue
      arrival = self._gradients.accepted.get(ask.incarnation)
      inside = -1 if arrival is None else arrival.message.sequence
      asked = msg.Asked(self._quorum.step, inside, ask.gradients, ask.lease)
      self._out.say(state, asked)

  def _present(self, tokens: dict[ReplicaId, int]) -> dict[Incarnation, int]:
    """The tokens of members that are connected."""
    if not tokens:
      return {}
    states = {state.member.replica: state for state in self._roster}
    found = {}
    for replica, count in tokens.items():
      state = states.get(replica)
      if state is not None and state.is_connected:
        found[state.member.incarnation] = count
    return found

  def _end_of_data(self) -> None:
    """Ends the run when the remaining data doesn't fill a step."""
    if (
      self._policy.exhausted
      and self._aggregation.attempt is None
      and not self._ending.has_begun
      and not self._ending.is_decided
    ):
      wrong = self._policy.lost_samples(self._config.max_skipped)
      if wrong:
        self._give_up(wrong)
        return
      self._ending.reason = "all data is used"
      self._step(quorum.Finish())

  def _note_removed(self, state: MemberState, left: bool, reason: str) -> None:
    member, step = state.member, self._quorum.step
    if left:
      self._out.note(notes.Leave(member.replica, step, member.incarnation))
    else:
      self._out.note(
        notes.Lost(member.replica, step, member.incarnation, reason)
      )

  def _note_stuck(self, state: MemberState, reason: str, stacks: str) -> None:
    member, step = state.member, self._quorum.step
    note = notes.Stuck(member.replica, step, reason, stacks, member.incarnation)
    self._out.note(note)

  def _dismiss(self, incarnation: Incarnation) -> None:
    """Stops waiting for a member: for an answer, as a witness, in the queue."""
    self._gradients.dismiss(incarnation)
    self._step(*self._aggregation.dismiss(incarnation))

  def _wait_for_state(self) -> None:
    """Waits while no member has the state: a lost one may come back with it."""
    since = self._snapshots.lacking_since
    if since is None:
      return
    waited = self._now - since
    own = self._roster.of_process(self._config.process)
    if self._is_untouched and own is not None:
      # Before the first step, any start state is as good as the lost one.
      if waited >= self._limits.pace:
        self._snapshots.lacking_since = self._now
        self._out.say(own, msg.TakeOver(fresh=True))
      return
    if not self._candidates.lost or waited >= self._config.timeout:
      step = self._quorum.step
      self._give_up(
        f"Step {step - 1} was committed by replicas that are all gone; nobody"
        " holds its parameters. Restart from a checkpoint."
      )

  @property
  def _is_untouched(self) -> bool:
    """Whether no step has been committed, or is about to be."""
    return self._quorum.step == self._view.origin_step

  def _let_go(self) -> None:
    """Lets replicas leave whose state all others have.

    These decisions are written immediately. If they waited for another record,
    the only other member with the state could be lost in the meantime.
    """
    busy = self._log.pending
    for state in self._roster.waiting():
      if state.leaving is None:
        continue
      step, since = state.leaving
      late = [s for s in self._roster if s.leaving is None and not s.has(step)]
      for other in late:
        self._snapshots.ask(other, self._quorum.step)
      last = len(self._roster) == 1 and bool(self._candidates.lost)
      waits = bool(late) or busy or last
      if not waits or self._now >= since + self._limits.patience:
        self._remove(state, "left", left=True)
        if not self._roster and not self._candidates.lost:
          # No replica has the state any more: joining is too late now.
          self._record_end("all replicas have left", "")

  # Gradients.

  def _arrive(self, state: MemberState, message: msg.Arrive) -> None:
    incarnation, replica = state.member.incarnation, state.member.replica
    if message.sequence <= state.sequence or message.count > message.total:
      self._reject(state.member.process, "a submission out of order")
      return
    if message.local_step > self._quorum.step:
      self._reject(state.member.process, "a gradient of a step to come")
      return
    why = self._policy.admit(incarnation, message)
    if why:
      self._reject(state.member.process, why)
      return
    state.sequence = message.sequence
    if not state.needs:
      state.applied = max(state.applied, message.applied)
    local_step = message.local_step
    held = self._quorum.inside.get(replica)
    inside = held.count if held and held.local_step == local_step else 0
    if inside + message.count != message.total:
      # A sum whose first part was decided separately in the meantime: of no
      # step, and too old at the first one already.
      local_step = -1 - self._config.max_staleness
    fresh = quorum.accepts(
      local_step, self._quorum.step, self._config.max_staleness
    )
    finite = is_finite = self._policy.is_finite(incarnation, message)
    if fresh and finite:
      # For the rules, a gradient on another replica's samples is as bad as NaN.
      finite = self._policy.fits(incarnation, message)
      found, expected = len(message.payload), 0
      if finite:
        before = self._policy.data(incarnation) if inside else ()
        expected = self._config.inline_size((*before, *message.data))
      if finite and found != expected:
        self._remove(
          state, f"it sent a gradient of {found:,} bytes, not {expected:,}"
        )
        return
    event = quorum.Arrive(
      replica, local_step, finite, incarnation, message.count
    )
    self._quorum, decisions = quorum.step(self._quorum, event)
    arrival = Arrival(incarnation, message, self._now, is_finite)
    self._decide(decisions, arrival)

  def _may_count(self, state: MemberState, message: msg.Arrive) -> bool:
    """Whether the rules may get a gradient now; otherwise it is queued."""
    if self._log.means + (self._config.inline_bytes or 0) > _MOST_MEANS:
      return False
    if self._config.alone:
      # Two that arrive meanwhile would be averaged, not applied one by one.
      return self._aggregation.attempt is None and self._all_have_come()
    if not self._state_is_here():
      return False
    attempt = self._quorum.attempt
    # If the attempt fails, the sum that it extends is accepted again.
    return (
      attempt is None
      or message.count == message.total
      or state.member.replica not in attempt.incarnations
    )

  def _count_queued(self) -> None:
    """Gives queued gradients to the rules, in order, as far as possible."""
    while (
      not self._ending.is_decided
      and (queued := self._gradients.queued) is not None
    ):
      incarnation, message = queued
      state = self._roster[incarnation]  # `_dismiss` removes others.
      if not self._may_count(state, message):
        return
      self._gradients.unqueue()
      self._arrive(state, message)

  def _all_have_come(self) -> bool:
    """Whether all members have connected to a new leader.

    If it is the only one with the state, a step of one gradient would be lost
    with it.
    """
    return all(state.is_connected for state in self._roster.waiting())

  def _state_is_here(self) -> bool:
    """Whether a step taken now can be applied by any replica.

    It can't if the only one with the state may be a replica that has yet to
    connect to the new leader, or was removed before it did, and may come back:
    it would miss the mean, and the others have nothing to apply it to.
    """
    # An inline mean is in the log, where that replica will read it.
    if self._config.inline:
      return True
    # While all are here, who has an earlier state and needs none will reach it.
    step = 0 if self._all_have_come() else self._quorum.step
    return any(s.is_connected and s.has(step) for s in self._roster)

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
          incarnation, message = arriving.incarnation, arriving.message
          self._gradients.accepted[incarnation] = arriving
          self._roster[incarnation].not_finite = 0
          if self._policy.accepted(incarnation, message):
            self._call_others(message.local_step)
          waits = self._policy.has_begun(message.local_step)
          if self._stall.since is None and waits:
            self._stall.begin(self._now)
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
          self._begin_to_end()
          return
        case _:
          assert_never(decision)
    for incarnation, count in self._present(tokens).items():
      self._policy.ask(incarnation, count)
    self._announce_asks()

  def _call_others(self, step: int) -> None:
    """Calls all members that have no gradient in a step that begins."""
    others = [
      state
      for state in self._roster
      if state.is_connected
      and state.member.incarnation not in self._gradients.accepted
    ]
    self._out.say_to(others, msg.Call(step))

  def _drop(
    self,
    drop: quorum.Drop,
    tokens: dict[ReplicaId, int],
    arriving: Arrival | None,
  ) -> None:
    incarnation = drop.incarnation
    arrival, reason = self._gradients.drop(drop, arriving)
    is_new = arrival is arriving
    state = self._roster.get(incarnation)
    asked = tokens.pop(drop.replica, None)
    lease: Spans = ()
    if arrival is not None:
      token = asked if incarnation in self._roster else None
      lease = self._policy.dropped(
        incarnation, arrival.message, is_new, token, reason
      )
      if is_new and state is not None and not self._ending.has_begun:
        self._delivered(state, reason, drop.count)
    # That the run has finished is told by the log alone: until it says so, the
    # next leader may go on.
    ends = drop.reason is quorum.Reason.FINISHED
    if state is not None and arrival is not None and not ends:
      message = arrival.message
      whole = not is_new or message.count == message.total
      count, sequence = asked or 1, message.sequence
      self._out.say(state, msg.Dropped(sequence, reason, count, lease, whole))
    self._out.note(
      notes.Drop(
        self._quorum.step,
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

  def _delivered(self, state: MemberState, reason: str, count: int) -> None:
    """A member has delivered what was dropped."""
    member, step = state.member, self._quorum.step
    self._stall.dropped(
      member.incarnation, member.replica, reason, count, self._now
    )
    if self._policy.has_begun(step):
      self._stall.waits()
    if reason != quorum.Reason.NON_FINITE:
      return
    before, times = state.not_finite, state.not_finite + count
    state.not_finite = times
    # Said rarely: it may go on for as long as the run does.
    if any(before < said <= times for said in _SAID_NOT_FINITE):
      self._name(state)
    elif not before:
      self._unnamed.add(member.incarnation)

  def _name(self, state: MemberState) -> None:
    """Says that a member's gradients are not finite."""
    member, times = state.member, state.not_finite
    self._unnamed.discard(member.incarnation)
    step = self._quorum.step
    self._out.note(
      notes.NotFinite(member.replica, step, times, member.incarnation)
    )
    text = (
      f"replica {member.replica}: {times} gradients in a row are not finite"
    )
    if self._policy.is_blocked(member.incarnation):
      text += "; it gets no more samples that others can take"
    self._out.add(fx.Log("warning", text))

  def _name_blocked(self) -> None:
    """Names members that get no more samples, if that was not said yet."""
    for incarnation in sorted(self._unnamed):
      state = self._roster.get(incarnation)
      if state is None or not state.not_finite:
        self._unnamed.discard(incarnation)
      elif self._policy.is_blocked(incarnation):
        self._name(state)

  def _swap(self) -> None:
    """Has a member try samples on which others' gradients were not finite."""
    if self._aggregation.attempt is not None or self._ending.has_begun:
      return
    incarnation = self._policy.swap()
    state = None if incarnation is None else self._roster.get(incarnation)
    if state is not None:
      self._step(quorum.Return(state.member.replica, state.member.incarnation))

  # Attempts and commits.

  def _parts(self, members: Iterable[quorum.Contribution]) -> tuple[Part, ...]:
    parts = tuple([self._part(c) for c in members])
    arrived = [self._gradients.accepted[p.incarnation].message for p in parts]
    return self._policy.weigh(parts, arrived)

  def _part(self, c: quorum.Contribution) -> Part:
    return Part(
      c.incarnation,
      c.replica,
      self._gradients.accepted[c.incarnation].message.sequence,
      c.local_step,
      c.staleness,
      c.count,
      c.weight,
      self._policy.data(c.incarnation),
    )

  def _start(self, start: quorum.StartAttempt) -> None:
    parts = self._parts(start.members)
    id_ = AttemptId(self.term, start.step, start.attempt, self._view.membership)
    message = announcement(id_, parts, self._roster)
    accepted = self._gradients.accepted
    ids = [accepted[part.incarnation].message.optimistic for part in parts]
    begun = optimistic.begun(message, ids, self._view, start.step)
    self._step(*self._aggregation.begin(message, begun, self._now))

  def _reported(
    self, state: MemberState, message: msg.Done | msg.Failed
  ) -> None:
    events = self._aggregation.reported(state, message, self._now)
    self._step(*events)
    if isinstance(message, msg.Failed) and any(
      isinstance(event, quorum.Failed) for event in events
    ):
      pair = self._aggregation.strike(state, message)
      if pair is not None and self._config.lower_on_loss:
        self._separate(*pair, message.reason)

  def _separate(
    self, state: MemberState, failed: MemberState, reason: str
  ) -> None:
    """Removes one of two members that can't reach each other.

    The others can continue without it; it pauses longer each time before it
    rejoins, so the two don't replace each other indefinitely.
    """
    why = f"replica {state.member.replica!r} can't reach it: {reason}"
    if failed.member.process == self._config.process:
      why = f"it can't reach replica {failed.member.replica!r}: {reason}"
      failed = state
    self._remove(failed, why)

  def _abandon(self, abandon: quorum.Abandon) -> None:
    attempt = self._aggregation.end()
    if attempt is None:
      return
    # Its members drop it when they begin the next one at this step.
    self._out.note(
      notes.Abandon(
        abandon.step,
        abandon.attempt,
        abandon.failed_replica,
        f"replica {abandon.failed_replica!r} could not do its part",
      )
    )
    for state in self._roster:
      # A snapshot may wait for a step that won't be committed now.
      state.server = None

  def _commit(
    self, commit: quorum.Commit, tokens: dict[ReplicaId, int]
  ) -> None:
    attempt = self._aggregation.end()
    if attempt is None:
      parts = self._parts(commit.members)
      id_ = AttemptId(
        self.term, commit.step, commit.attempt, self._view.membership
      )
      seconds = 0.0
    else:
      parts, id_ = attempt.message.parts, attempt.id
      seconds = self._now - attempt.began
    arrivals = self._gradients.commit(parts)
    details = tuple(
      [
        # Microseconds: with hundreds of members each digit counts.
        Details(
          a.message.batches, a.message.compute, round(self._now - a.at, 6)
        )
        for a in arrivals
      ]
    )
    dropped = tuple(sorted(self._gradients.dropped.items()))
    following = self._policy.committed(parts, self._present(tokens), seconds)
    if following is not None:
      tokens.clear()
    leases, skipped = following or ((), ())
    mean = None
    if self._config.inline:
      payloads = [a.message.payload for a in arrivals]
      mean = self._config.average(parts, payloads)
    entry = Committed(
      id_,
      parts,
      mean,
      self._saving,
      details,
      dropped,
      leases,
      skipped,
      tuple(self._changes.values()),
    )
    self._saving = False
    self._changes.clear()
    self._log.add(entry)
    timings = [a.message.timings for a in arrivals]
    self._out.note(notes.committed(entry, timings))
    self._stall.end()
    if self._gradients.accepted:
      self._stall.begin(self._now)
    self._aggregation.committed()
    for part in parts:
      state = self._roster.get(part.incarnation)
      if state is not None and mean is None and state.applied == commit.step:
        # It has the mean, and will soon have the state. With a gradient of an
        # older step it may still lack an earlier mean.
        state.applied = commit.step + 1
      if state is not None and state.leaving is not None:
        # The state it wanted to leave with isn't the last one any more.
        state.leaving = (commit.step + 1, state.leaving[1])
    for state in self._roster:
      if commit.step + 1 - state.applied >= _ASK_LAG and not state.needs:
        self._snapshots.ask(state, self._quorum.step)

  # Ends.

  def _begin_to_end(self) -> None:
    """Commits nothing more; the end waits for replicas that are behind."""
    # Those that are behind learn of the last step once it is in the log.
    self._ending.begin(self._now, self._view.step >= self._quorum.step)
    self._stall.end()
    self._aggregation.end()

  def _end(self) -> None:
    """Ends the run once all have the final state, or after a while."""
    since = self._ending.since
    if since is None or self._ending.is_decided:
      return
    late = [s for s in self._roster if not s.has(self._quorum.step)]
    for state in late:
      self._snapshots.ask(state, self._quorum.step)
    if not late or self._now >= since + self._limits.patience:
      self._record_end(self._ending.reason, "")

  def _record_end(
    self, reason: str, error: Literal["", "CoordinatorError", "Diverged"]
  ) -> None:
    if self._ending.is_decided:
      return
    self._ending.decide(self._now)
    self._stall.end()
    dropped = tuple(sorted(self._gradients.dropped.items()))
    step = self._quorum.step
    self._log.add(Ended(step, reason, error, dropped))
    ledger = {"applied": self._gradients.applied, "dropped": dict(dropped)}
    self._out.note(notes.Finish(step, reason, None if error else ledger))

  def _give_up(
    self,
    reason: str,
    error: Literal["CoordinatorError", "Diverged"] = "CoordinatorError",
  ) -> None:
    self._aggregation.end()
    self._record_end(reason, error)

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
      self._give_up(f"The run cannot go on: {decision}")
    else:
      self._stalled(decision.step, 0.0, str(decision))

  def _fingerprint(self, state: MemberState, message: msg.Fingerprint) -> None:
    # It had that state: a fingerprint takes a while, and it may need a snapshot
    # by now.
    state.applied = max(state.applied, message.step)
    replica, step = state.member.replica, message.step
    digest, first = self._prints.setdefault(step, (message.digest, replica))
    if digest != message.digest:
      self._give_up(
        f"After {step} steps replicas {first!r} and {replica!r} hold different "
        f"parameters or optimizer states ({digest} and {message.digest}).",
        "Diverged",
      )
    elif first == replica:
      params, _, whole = digest.partition("-")
      self._out.note(notes.Fingerprint(step, replica, params, whole))
      for old in [s for s in self._prints if s < step - 64]:
        del self._prints[old]

  # Time.

  def _proceed(self) -> None:
    """Does what follows from an input, and from the time."""
    now = self._now
    self._count_queued()
    for peer, hello in self._candidates.ready(self._roster, now):
      self._hello(peer, hello, waited=True)
    for state in self._roster.waiting():
      if now >= state.until:
        self._remove(state, "it has not come to the new leader")
    self._stop_expecting()
    self._judge()
    self._check_window()
    self._check_attempt()
    self._check_waiting()
    self._swap()
    self._name_blocked()
    self._end_of_data()
    if not self._ending.is_decided:
      step, attempt = self._quorum.step, self._aggregation.attempt
      self._snapshots.serve(step, step + (attempt is not None), now)
      self._wait_for_state()
      self._let_go()
      self._end()
      self._hand_over()
    if now >= self._heartbeat.due:
      position, untouched = self._log.position, self._view.untouched
      self._out.add(self._heartbeat.beat(now, position, untouched))
      probe = self._log.probe()
      if probe is not None:
        self._out.add(probe)
    log = self._log
    if log.record is not None and now >= log.since + self._limits.pace:
      self._resign("the store doesn't answer")

  def _judge(self) -> None:
    """Evicts members whose gradients were found to be wrong."""
    while (
      not self._ending.is_decided
      and (verdict := self._policy.verdict()) is not None
    ):
      states = {i: self._roster[i] for i in verdict.digests}
      names = [state.member.replica for state in states.values()]
      wrong = [states[i].member.replica for i in verdict.wrong]
      digests = {
        str(states[i].member.replica): d for i, d in verdict.digests.items()
      }
      step, slot = self._quorum.step, verdict.slot
      self._out.note(notes.Audit(step, slot, digests, wrong))
      what = f"gradient of micro-batch {slot} of step {step}"
      if not wrong:
        self._give_up(
          f"Replicas {names} have computed different values of the {what}, and no"
          " other replica is left to decide which is wrong. Resume from the last"
          " checkpoint with three replicas, which can."
        )
      for incarnation in verdict.wrong:
        others = [name for name in names if name not in wrong]
        why = f"its {what} is not what replicas {others} have computed"
        self._wrong[states[incarnation].member.process] = why
        self._remove(states[incarnation], why)

  def _check_window(self) -> None:
    """Begins a step that no gradient has begun, and closes one that is over."""
    policy, step = self._policy, self._quorum.step
    first = self._gradients.first
    here = len(self._gradients.accepted) == len(self._roster)
    if policy.begins(self._quorum, first, here):
      # Its members have waited since they contributed; others only from now on.
      first = min(first, self._now)
      self._stall.begin(first, excused=self._now - first)
      self._call_others(step)
    first = min(first, self._now)
    if policy.closes(self._quorum, first):
      self._step(quorum.Close(step))
    if not self._ending.is_decided:
      self._announce_asks()

  def _check_attempt(self) -> None:
    """Tells the members of an optimistic attempt that all have begun it."""
    attempt = self._aggregation.attempt
    if attempt is not None and self._now >= attempt.due(self._limits):
      attempt.limited = True
      self._out.say_to(self._roster, msg.AllBegun(attempt.id))

  def _check_waiting(self) -> None:
    if self._ending.is_decided:
      return
    found, step = self._stall.check(self._now), self._quorum.step
    if found is None:
      return
    waited, too_long = found
    text = self._stall.text(self._quorum)
    if too_long:
      self._give_up(f"Step {step} made no progress for {waited:.1f} s: {text}.")
    else:
      missing = quorum.missing(self._quorum)
      counts = self._stall.counts() or None
      self._out.note(notes.Stall(step, waited, missing._asdict(), counts))
      self._stalled(step, waited, text)

  def _stalled(self, step: int, waited: float, text: str) -> None:
    for effect in self._publisher.to_all(msg.Stalled(step, waited, text)):
      self._out.hold(effect)
