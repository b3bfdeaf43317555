"""A replica: follows the log, submits gradients, finds or becomes the leader.

What it does follows from the log, its training loop, and its leader.

    the log    -> View        who is a member, what is committed
               -> Applier     the state: means, updates, snapshots
    the loop   -> Session     submissions, until each has its outcome
    the leader -> Link        which one is followed, or called
               -> Assignment  what to compute next
    no leader  -> Search      finds it, or claims leadership
"""

from __future__ import annotations

import collections
import math
from typing import Literal, assert_never

from optax_dist import quorum
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import optimistic
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Ended,
  Entry,
  Incarnation,
  Joined,
  Part,
  Process,
  Record,
  Removed,
  Run,
  Term,
)
from optax_dist.coordinator.protocol.follower.applier import Applier
from optax_dist.coordinator.protocol.follower.assignment import Assignment
from optax_dist.coordinator.protocol.follower.link import FIRST_PAUSE, Link
from optax_dist.coordinator.protocol.follower.search import (
  Finding,
  LeaderFound,
  Search,
  Situation,
  StartAt,
)
from optax_dist.coordinator.protocol.follower.session import Session
from optax_dist.coordinator.protocol.inputs import Input
from optax_dist.coordinator.protocol.log import (
  KEPT,
  RUN_KEY,
  TOLD,
  Count,
  FellOff,
  LogRead,
  StoreWatch,
)
from optax_dist.coordinator.protocol.membership import View
from optax_dist.ledger import Progress, Spans
from optax_dist.ledger import spans as sp

# What a replica may want of its leader, in the order in which a new one is told.
# Of fingerprints it is the last one: others may tell theirs of the same step.
_WISHES = (
  msg.Leave,
  msg.Finish,
  msg.Save,
  msg.NeverJoined,
  msg.SetHyperparams,
  msg.Fingerprint,
)


class Follower:
  """One replica's side of the protocol.

  Attributes:
    view: the decisions of the log, as far as it was read.
    incarnation: incarnation of the membership; -1 for none.
    elected: the position of a `Term` of this process and the records up to it,
      until a `Leader` is created from them.
    over: whether it has ended: failed, finished, left, aborted.
  """

  def __init__(self, config: Config, count: Count):
    self._config, self._count = config, count
    self._limits = config.deadlines
    self._out: list[Effect] = []
    self.view = View()
    self.incarnation: Incarnation = -1
    self.elected: tuple[int, tuple[Record, ...]] | None = None
    self.over = False
    # The latest records, for what lacks them when this replica leads.
    self._latest: collections.deque[msg.Recorded] = collections.deque(
      maxlen=KEPT
    )
    self.session = Session()
    self.applier = Applier(config, self.session, self._out, self._tell)
    self._search = Search(config, count)
    self._store = StoreWatch()
    # The next position; and whether the view has all that is before it.
    self._position, self._complete = -1, False
    self._link = Link(config.deadlines)
    # What it wants of its leader, by kind; and when it leaves without an answer.
    self._wishes: dict[type, msg.Message] = {}
    # How often it has wanted to set hyperparameters.
    self._changes = 0
    self._leave_by = math.inf
    self._assignment = Assignment(config, self._out)
    # The membership that is tied to the connection to the leader.
    self._promised: Incarnation = -1
    self._office = -1
    self._nonce, self._run_request, self._run_at = "", -1, math.inf
    self._admission, self._admitted = 0, -1
    self._last_incarnation = -1
    # Another process that is a member with this replica's id, and how long its
    # removal may take.
    self._rival, self._rival_until = -1, math.inf
    self._optimistic_at = (-1, -1)
    # Whether it has requested the final state, and the deadline for it.
    self._asked_for_end, self._end_by = False, math.inf
    # Since when it waits, and for which step: the next one starts a new wait.
    self._waiting_since, self._waiting_step = math.inf, -1
    self._missing = ""
    # When a leader was last heard from, and by which message.
    self._heard: tuple[float, str] | None = None

  def read(self) -> tuple[int, View]:
    """The position up to which it has read the log, and what that decides."""
    return self._position, self.view

  @property
  def stalled(self) -> bool:
    """Whether the leader says that a step takes long."""
    return bool(self._missing)

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects, in order."""
    if not self.over:
      self._handle(input_, now)
    elif isinstance(input_, ins.Received):
      self._serve_after_the_end(input_)
    if not self.over:
      self._proceed(now)
    effects, self._out[:] = self._out[:], []
    self._store.asked(effects, now)
    return effects

  def _serve_after_the_end(self, received: ins.Received) -> None:
    """Serves the final state to others after the end."""
    message = received.message
    if received.peer == self._link.leader and isinstance(message, msg.Serve):
      self.applier.serve(message)

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    if self.over:
      return math.inf
    time = min(
      self._run_at,
      self._leave_by,
      self._end_by,
      self._rival_until,
      self._link.deadline,
      self._waiting_since + self._patience,
    )
    if self._search.idle:
      return time
    return min(time, self._search.deadline(self._situation()))

  def _situation(self) -> Situation:
    holds = self.applier.current and self.applier.step == self.view.step
    return Situation(
      self.view,
      self._position,
      self._complete,
      self.incarnation,
      holds,
      self.applier.start,
    )

  def _proceed(self, now: float) -> None:
    """Does what follows from an input, and from the time."""
    if self._link.is_unanswered(now):
      self._lose_leader(self._link.called, now)  # Which may make it a member.
    self._admit()
    self._end_if_ended(now)
    if not self.over:
      self._check_rival(now)
    if self.over:
      return
    if now >= self._leave_by:
      self._leave()
      return
    if now >= self._run_at:
      self._get_run()
    if now >= self._link.call_at:
      self._call(self.view.leader, self.view.leader_address, now)
    if not self._search.idle:
      self._out += self._search.proceed(now, self._situation())
    self._check_waiting(now)

  def _handle(self, input_: Input, now: float) -> None:
    match input_:
      case ins.Started(nonce):
        self._nonce = nonce
        self._get_run()
      case ins.TimePassed():
        pass
      case ins.Received(peer, message):
        self._receive(peer, message, now)
      case ins.Malformed(peer, error):
        self._out.append(fx.Log("warning", f"{peer} sent nonsense: {error}"))
        self._out.append(fx.Send(peer, msg.Rejected(error)))
      case ins.PeerLost(peer, how, reason):
        self._lose_peer(peer, how, reason, now)
      case ins.PutAnswered():
        self._store.answered(input_, now)
        if input_.request != self._run_request:
          situation = self._situation()
          self._out += self._search.put_answered(input_, now, situation)
        elif input_.answer == "unknown":
          self._run_at = now + self._limits.pace / 8
        else:
          self._get_run()
      case ins.GetAnswered():
        self._store.answered(input_, now)
        if input_.request == self._run_request:
          self._run_found(input_, now)
        else:
          found = self._search.get_answered(input_, now, self._situation())
          self._searched(*found, now=now)
      case ins.StoreLost(reason):
        self._fail("CoordinatorError", f"The store can't be used: {reason}.")
      case ins.Aggregated():
        self.applier.aggregated(input_)
      case ins.AggregateFailed():
        self.applier.aggregate_failed(input_)
      case ins.SnapshotFetched():
        self.applier.fetched(input_)
      case ins.SnapshotFailed():
        self.applier.fetch_failed(input_)
      case ins.Submitted():
        self._submit(input_)
      case ins.LeaveWanted():
        # A process must be a member to leave: others may wait for it.
        self._wish(msg.Leave(lost=False), now)
      case ins.FinishWanted(reason):
        self._wish(msg.Finish(reason), now)
      case ins.SaveWanted():
        self._wish(msg.Save(), now)
      case ins.NeverJoined(replicas):
        self._wish(msg.NeverJoined(replicas), now)
      case ins.HyperparamsWanted(values):
        old = self._wishes.get(msg.SetHyperparams)
        if isinstance(old, msg.SetHyperparams):
          values = tuple((dict(old.values) | dict(values)).items())
        self._changes += 1
        self._wish(msg.SetHyperparams(self._changes, values), now)
      case ins.Aborted(reason, stacks):
        self._tell(msg.Leave(True, reason, stacks))
        self._stop()
      case ins.FingerprintTaken(step, digest):
        self._wish(msg.Fingerprint(step, digest), now)
      case _:
        assert_never(input_)

  # The identity of the run.

  def _get_run(self) -> None:
    self._run_at = math.inf
    self._run_request = self._count()
    self._out.append(fx.Get(self._run_request, RUN_KEY))

  def _run_found(self, answer: ins.GetAnswered, now: float) -> None:
    self._run_request = -1
    if not answer.known:
      self._run_at = now + self._limits.pace / 8
    elif isinstance(answer.value, Run):
      self._out.append(fx.UseRun(answer.value.nonce))
      self._search.begin(now)
    else:
      self._run_request = self._count()
      run = Run(self._nonce)
      self._out.append(fx.Put(self._run_request, RUN_KEY, run))

  # The leader.

  def _searched(
    self, effects: list[Effect], findings: list[Finding], now: float
  ) -> None:
    self._out += effects
    for finding in findings:
      match finding:
        case LeaderFound(process, address):
          self._call(process, address, now)
        case StartAt(position):
          self._position, self._complete = position, position == 0
        case FellOff(position):
          called = self._link.called
          if called and self._search.replaced(called, self.view):
            self._lose_leader(called, now)
          # A leader that is followed, or being called, knows better.
          if self._link:
            self._search.pause(now)
          else:
            self._fall_off()
            self._position = position
        case LogRead(records=records):
          for position, record in records:
            self._recorded(position, record, now)
        case _:
          assert_never(finding)

  def _fall_off(self) -> None:
    """Handles a trimmed log: others have continued without this replica."""
    self._end_membership()
    self.applier.skip()
    self._out += self.session.lost(quorum.Reason.LOST.value)
    self._position, self._complete = -1, False

  def _call(self, process: Process, address: str, now: float) -> None:
    """Asks a leader for its stream of the log, and for membership."""
    self._link.call_at = math.inf
    if process in self._link:
      return
    self._link.call(process, now)
    if process != self._config.process:
      self._out.append(fx.Connect(process, address))
    hello = msg.Hello(
      self._config.agreement,
      self._config.replica,
      self._config.address,
      self.incarnation,
      self._position if self._complete else -1,
      self.applier.step if self.applier.sound else -1,
      self._link.calls,
      self._assignment.lease,
      self._store.shortest,
    )
    self._out.append(fx.Send(process, hello))

  def _lose_peer(
    self, peer: Process, how: str, reason: str, now: float
  ) -> None:
    refused = how == "refused" and peer == self._link.called
    if refused and not self._admission and self.view.ended is None:
      self._fail("JoinRefused", f"The leader's process refuses: {reason}.")
    elif peer in self._link:
      again = peer == self._link.leader and how != "left"
      self._lose_leader(peer, now)
      if again and self.incarnation >= 0:
        # Perhaps only the connection has failed. If it keeps failing, it must
        # not interrupt the others with one membership after the other.
        self._link.call_at = now + self._link.pause_removed(now, first=0.0)
        self._search.unreachable[peer] = self._link.call_at

  def _lose_leader(
    self, peer: Process, now: float, when: float | None = None
  ) -> None:
    """Handles that it can't talk to any leader.

    Args:
      peer: the one that it could not talk to, or "".
      now: the time.
      when: when to look for another one; None for at once.
    """
    if peer and peer == self._link.called:
      pause = self._limits.pace / 2
      self._search.unreachable[peer] = now + pause
      self._out.append(fx.Disconnect(peer, "no answer"))
    self._link.lose()
    self._asked_for_end, self._end_by = False, math.inf
    member = self.view.of_process(self._config.process)
    if member is not None and self._complete and self.incarnation < 0:
      # The leader was lost before it could say so.
      self._begin_membership(member.incarnation, self.view.step, now)
    self._search.begin(now, when)

  def _welcomed(self, peer: Process, welcome: msg.Welcome, now: float) -> None:
    """Starts to read a leader's stream of the log."""
    if peer != self._link.called or welcome.call != self._link.calls:
      return
    self._link.follow()
    self._search.end()
    self.applier.new_leader()
    if welcome.view is not None:
      if self._position != welcome.position or not self._complete:
        self._fall_off()
      self._position, self._complete = welcome.position, True
      self.view = welcome.view.copy()
      self._tell_progress([(self.view.step, self.view.progress)])
      self._office = max(self._office, self.view.term - 1)
    self._promised = welcome.incarnation
    if self.incarnation != self._promised:
      # A membership lives on one connection; the log tells how it ended.
      self._end_membership()
      if self._promised in self.view.members:
        self._begin_membership(self._promised, self.view.step, now)
    if self.incarnation < 0:
      return
    self._out += self.session.new_leader()
    self.applier.tell_state()
    if self.session.pending is not None:
      self._arrive()
    self._tell_wishes(now)

  def _wish(self, message: msg.Message, now: float) -> None:
    """Tells the leader what it wants; each new leader is told again."""
    self._wishes[type(message)] = message
    if isinstance(message, msg.Leave):
      # Others replace a leader that is dead in the meantime.
      limits = self._limits
      self._leave_by = now + limits.silence
      self._leave_by += 2 * (limits.pace + limits.patience)
    self._tell(message)

  def _tell_wishes(self, now: float) -> None:
    """Sends a leader what it can't know of this replica."""
    for kind in _WISHES:
      if kind in self._wishes:
        self._wish(self._wishes[kind], now)

  def _tell(self, message: msg.Message) -> None:
    """Sends to the leader, if there is one and this replica is a member."""
    if self._link.leader and self.incarnation >= 0:
      self._out.append(fx.Send(self._link.leader, message))

  # Messages.

  def _receive(self, peer: Process, message: msg.Message, now: float) -> None:
    if peer in self._link:
      self._heard = now, type(message).__name__
    match message:
      case msg.Canvass(term):
        leads = self.view.leader == self._config.process
        hears = self.view.term > term or bool(self._link.leader) or leads
        if self.view.term > term:
          # It has missed the new leader's record, and may not reach the store.
          told = list(self._latest)[-TOLD:]
          self._out += [fx.Send(peer, recorded) for recorded in told]
        self._out.append(fx.Send(peer, msg.Standing(term, hears)))
        if not hears:
          self._vote(peer, False)
      case msg.Standing(term, hears):
        if term == self.view.term:
          self._vote(peer, hears)
          if (
            hears
            and not self._link.called
            and self._search.may_call(self.view.leader, now)
          ):
            # Only this replica has lost it.
            self._call(self.view.leader, self.view.leader_address, now)
      case msg.Hello():
        self._out.append(fx.Send(peer, msg.NotLeader()))
      case msg.Welcome():
        self._welcomed(peer, message, now)
      case msg.NotLeader():
        if peer == self._link.leader:
          self._lose_leader(peer, now)
        elif peer == self._link.called:
          # Perhaps not yet, or it has yet to hear that its last record is there.
          when = now + self._link.pause_refused()
          self._search.unreachable[peer] = when
          self._lose_leader("", now, when)
          if peer == self.view.leader and self.view.ended is None:
            self._link.call_at = when
      case msg.Recorded():
        self._stream(peer, message, now)
      case msg.Refused(reason):
        if peer == self._link.called:
          self._fail(
            "JoinRefused",
            f"The job refuses replica {self._config.replica!r}: {reason}.",
          )
      case msg.Rejected(reason):
        text = f"{peer} has rejected a message: {reason}"
        self._out.append(fx.Log("warning", text))
      case _:
        if peer == self._link.leader:
          self._of_leader(message, now)

  def _of_leader(self, message: msg.Message, now: float) -> None:
    match message:
      case msg.Attempt():
        self.applier.attempt(message, self.incarnation, self.view.members)
      case msg.AllBegun(attempt):
        self._out.append(fx.LimitWait(attempt))
      case msg.Dropped(sequence, reason, count, lease, whole):
        self._assignment.lend(self.incarnation, lease)
        self._assignment.ask(count)
        self._out += self.session.dropped(sequence, reason, whole)
      case msg.Asked(step) if self._config.deterministic and (
        step < self.view.step
      ):
        pass  # It is older than the commit, which leases other samples.
      case msg.Asked(step, sequence, count, lease):
        void = self._assignment.is_void(step)
        if not void and (lease or self._config.deterministic):
          self._assignment.lend(self.incarnation, lease, more=sequence >= 0)
        taken = self.session.asked_for_more(sequence)
        if taken or sequence < 0:
          self._assignment.ask(count)
        self._out += taken
      case msg.TakeOver(fresh):
        self._out += self._search.take_over(self._situation(), fresh)
      case msg.Call(step):
        self._out.append(fx.Called(step))
      case msg.Serve():
        self.applier.serve(message)
      case msg.Fetch():
        self._end_by = math.inf
        self.applier.fetch(message)
      case msg.Report():
        self.applier.report(message)
      case msg.Stalled(step, waited, missing):
        self._missing = missing
        text = f"step {step} has taken {waited:.1f} s so far: {missing}"
        self._out.append(fx.Log("warning", text if waited else missing))
      case _:
        text = f"a leader doesn't say {type(message).__name__}"
        self._out.append(fx.Send(self._link.leader, msg.Rejected(text)))

  def _vote(self, peer: Process, hears: bool) -> None:
    member = self.view.of_process(peer)
    if member is not None:
      self._search.voted(member.incarnation, hears)

  # The log.

  def _stream(self, peer: Process, recorded: msg.Recorded, now: float) -> None:
    """Handles a record in the log, from any replica."""
    position, record = recorded.position, recorded.record
    if position < self._position:
      term = record.entries[0]
      if isinstance(term, Term) and term.term == self.view.term:
        # It was called before it knew that it is the leader.
        self._call(term.leader, term.address, now)
      return
    if position > self._position >= 0:
      # The records in between, or read by a new leader, must be read here too.
      term = record.entries[0]
      if isinstance(term, Term):
        self._search.heard(now)
        if self._link.leader or self._link.called not in ("", term.leader):
          # Others may hear the new one: that is no reason to call this one again.
          earlier = self._link.leader or self._link.called
          self._search.unreachable[earlier] = now + self._limits.pace / 2
          self._lose_leader("", now)
      elif peer == self._link.leader:
        self._lose_leader(peer, now)
      return
    self._recorded(position, record, now)

  def _recorded(self, position: int, record: Record, now: float) -> None:
    """Handles the next record of the log, or one that was seen before."""
    if self.over or position != self._position or self.view.ended is not None:
      return
    self._position += 1
    if self._latest and self._latest[-1].position != position - 1:
      self._latest.clear()
    self._latest.append(msg.Recorded(position, record))
    self._search.heard(now)
    steps = self.view.apply(position, record)
    if self._complete and self.view.broken:
      # No leader of this version has put it. Going on without that step, this
      # replica would differ from the others without a word.
      self._fail(
        "CoordinatorError",
        f"The log of the run is damaged: {self.view.broken}. Resume from a"
        " checkpoint, with a store or run name of its own.",
      )
      return
    self._tell_progress(steps)
    for entry in record.entries:
      self._entry(position, record, entry, now)
      if self.over:
        return

  def _entry(
    self, position: int, record: Record, entry: Entry, now: float
  ) -> None:
    if not self._complete and not isinstance(entry, Term | Ended):
      return  # What was before it is unknown.
    match entry:
      case Term():
        self._new_term(position, entry, now)
      case Joined(member):
        if member.process == self._config.process:
          later = record.entries[record.entries.index(entry) :]
          commits = sum(isinstance(e, Committed) for e in later)
          self._joined(member.incarnation, self.view.step - commits, now)
        elif member.replica == self._config.replica and (
          0 <= self._last_incarnation < member.incarnation
        ):
          self._rival = member.incarnation
          # If this one was removed before, the other may be dead already: its
          # request may have been delayed for long.
          pause = 0.0 if self.incarnation >= 0 else self._limits.pace
          self._rival_until = now + pause / 2
      case Removed(incarnation, left, reason):
        if incarnation == self.incarnation:
          self._removed(left, reason, now)
        else:
          self.applier.removed(incarnation)
          if len(self.view.members) == 1:
            self.applier.left_alone()
      case Committed():
        self._missing = ""
        if entry.save:
          self._wishes.pop(msg.Save, None)
        latest = self._config.process, self._changes
        if latest in [(c.process, c.number) for c in entry.changes]:
          self._wishes.pop(msg.SetHyperparams, None)
        self.session.committed(entry, self._last_incarnation)
        self._assignment.committed(entry, self.incarnation)
        self.applier.committed(entry)
      case Ended():
        self._out += self.session.lost(quorum.Reason.FINISHED.value)
      case _:
        assert_never(entry)

  def _check_rival(self, now: float) -> None:
    """Fails if another process is a member with this replica's id."""
    if now < self._rival_until:
      return
    self._rival_until = math.inf
    if self._rival in self.view.members:
      # If it rejoined, the two would keep replacing each other.
      self._fail(
        "CoordinatorError",
        f"Another process has joined as replica {self._config.replica!r}, "
        "and takes the place of this one. If both are wanted, they need "
        "numbers of their own.",
      )

  def _new_term(self, position: int, entry: Term, now: float) -> None:
    mine = entry.leader == self._config.process
    if entry.fresh:
      self._complete = True
      self._end_membership()
      self._out += self.session.lost(quorum.Reason.LOST.value)
      self.applier.start_anew()
    if mine and self.incarnation != entry.incarnation and self._complete:
      self._promised = entry.incarnation
      self._begin_membership(entry.incarnation, self.view.step, now)
    self.elected = None
    if mine and self._office < entry.term:
      self._office = entry.term
      self.elected = (position, tuple(one.record for one in self._latest))
    self._search.trust()
    self._call(entry.leader, entry.address, now)

  def _tell_progress(self, found: list[tuple[int, Progress]]) -> None:
    if self._config.data is not None and self._complete:
      for step, progress in found:
        self._out.append(fx.Progressed(step, progress))

  # Membership.

  def _begin_membership(
    self, incarnation: Incarnation, step: int, now: float
  ) -> None:
    self._end_membership()
    self._out += self.session.lost(quorum.Reason.LOST.value)
    self.incarnation = self._last_incarnation = incarnation
    self._waiting_since = math.inf
    self._wishes.pop(msg.Fingerprint, None)
    self.applier.begin(self.view, step)
    self._tell_wishes(now)

  def _joined(self, incarnation: Incarnation, step: int, now: float) -> None:
    """Handles a `Joined` entry of this process, which joins at a step."""
    expected = self._promised if self._link.leader else -1
    if incarnation == expected or not self._link:
      self._begin_membership(incarnation, step, now)
    elif self.incarnation != incarnation:
      # It is tied to another connection, or to a future one.
      self._end_membership()
      self._out += self.session.lost(quorum.Reason.LOST.value)

  def _end_membership(self) -> None:
    if self._admitted == self.incarnation >= 0:
      self._out.append(fx.Suspended())
    self.incarnation = self._admitted = -1
    self._assignment.end()
    self.applier.end()

  def _removed(self, left: bool, reason: str, now: float) -> None:
    self._out += self.session.lost(quorum.Reason.LOST.value)
    self._end_membership()
    if left:
      self._leave()
      return
    config = self._config
    self._out.append(
      fx.Log(
        "warning",
        f"replica {config.replica!r} was removed ({reason}); it joins again",
      )
    )
    if self._link.called:
      return  # It has already asked to join.
    if self._link.leader and self._link.leader != config.process:
      self._out.append(fx.Disconnect(self._link.leader, "it was removed"))
    self._link.leader = ""
    # If it is about to call its leader again, this is part of the same loss.
    when, self._link.call_at = self._link.call_at, math.inf
    if when == math.inf:
      when = now + self._link.pause_removed(now, FIRST_PAUSE)
    self._search.begin(now, when)

  def _admit(self) -> None:
    """Tells the training loop, once it is a member and has the state."""
    applier = self.applier
    if (
      self.incarnation >= 0
      and self._admitted != self.incarnation
      and applier.sound
      and not applier.needs
    ):
      self._admitted = self.incarnation
      self._admission += 1
      self._out.append(
        fx.Admitted(self._admission, self.incarnation, self.view.lineage)
      )

  def _leave(self) -> None:
    self._out.append(fx.Left())
    self._stop()

  # The training loop.

  def _submit(self, submitted: ins.Submitted) -> None:
    if self.view.ended is not None:
      reason = quorum.Reason.FINISHED
    elif (
      submitted.admission != self._admission
      or self._admitted != self.incarnation
    ):
      reason = quorum.Reason.LOST
    else:
      self._out += self.session.submit(submitted)
      if self.session.pending is submitted:
        self._arrive()
      return
    self._out.append(fx.Resolved(submitted.sequence, reason.value, 0))

  def _arrive(self) -> None:
    """Sends the pending submission, and begins the optimistic attempt."""
    pending = self.session.pending
    assert pending is not None
    if not self._link.leader:
      return  # It will be sent to the next leader.
    count = self.session.count()
    step, me = self.applier.step, self.incarnation
    parts: tuple[Part, ...] = ()
    # A second gradient under the same id could be mistaken for the first.
    if self.applier.current and self._optimistic_at != (self.view.term, step):
      parts = optimistic.parts(
        self._config, self.view, me, step, pending, count
      )
    attempt = None
    if parts:
      self._optimistic_at = (self.view.term, step)
      attempt = AttemptId(*self._optimistic_at, 0, self.view.membership)
    self._tell(
      msg.Arrive(
        pending.sequence,
        pending.local_step,
        pending.total,
        count,
        pending.finite,
        step,
        attempt,
        pending.payload,
        pending.batches,
        pending.compute,
        pending.timings,
        self._data_of(pending, count),
        pending.work,
      )
    )
    if attempt is not None:
      self.applier.optimistic(attempt, parts, me, self.view.members)

  def _data_of(self, pending: ins.Submitted, count: int) -> Spans:
    """The samples of the last gradients of a sum."""
    data = self._config.data
    if data is None or count == pending.total:
      return pending.data
    unit = data.unit(self._config.replicas_to_aggregate)
    return sp.tail(pending.data, count * unit)

  # Ends.

  def _end_if_ended(self, now: float) -> None:
    ended, applier = self.view.ended, self.applier
    if ended is None or self.over:
      return
    applier.pump()  # Records read before its membership ended may suffice.
    if ended.error:
      diverged = ended.error == "Diverged"
      self._fail("Diverged" if diverged else "CoordinatorError", ended.reason)
    elif applier.sound and not applier.needs and applier.step >= ended.step:
      self._out += self.session.lost("finished", counted=True)
      self._out.append(fx.Finished(ended.reason))
      self._stop()
    elif applier.hopeless and not self._awaits_end(now):
      replica = self._config.replica
      lacks = f"has only the parameters of step {applier.step}"
      if not applier.sound:
        lacks = "joined after the run had ended and received no parameters"
      self._fail(
        "RunFinished",
        f"The run has ended ({ended.reason}) at step {ended.step}, and replica "
        f"{replica!r} {lacks}: no replica is left that could send the final "
        "ones. They are in the last checkpoint; a job that is to train on needs "
        "a store, or a run name, of its own.",
      )

  def _awaits_end(self, now: float) -> bool:
    """Requests the final state, once; returns whether it may come."""
    if self._link.called or self._link.call_at < math.inf:
      return True
    if not self._link.leader or self._link.leader == self._config.process:
      return False
    if not self._asked_for_end:
      self._asked_for_end = True
      self._end_by = now + self._limits.patience
      self.applier.lack("the run has ended")
      ask = msg.NeedsSnapshot(self.applier.step)
      self._out.append(fx.Send(self._link.leader, ask))
    return now < self._end_by < math.inf

  def _fail(
    self,
    error: Literal[
      "CoordinatorError", "JoinRefused", "RunFinished", "Diverged"
    ],
    reason: str,
  ) -> None:
    self._out.append(fx.Fail(error, reason))
    self._out += self.session.lost(quorum.Reason.LOST.value, counted=True)
    self._stop()

  def _stop(self) -> None:
    self.over = True
    self._search.end()

  @property
  def _patience(self) -> float:
    """How long it waits; only a leader may need more than `timeout`."""
    limits = self._limits
    return limits.replica if self._store.reached else limits.timeout

  def _check_waiting(self, now: float) -> None:
    """Fails a replica that waits for too long, whatever the leader says."""
    waits = (
      self._admitted < 0
      or self.session.waits
      or bool(self.applier.awaits)
      or msg.Leave in self._wishes
      or msg.Finish in self._wishes
      or self.view.ended is not None
    )
    if not waits:
      self._waiting_since = math.inf
    elif math.isinf(self._waiting_since) or (
      self._waiting_step != self.applier.step
    ):
      self._waiting_since, self._waiting_step = now, self.applier.step
    elif now >= self._waiting_since + self._patience:
      waited = f"has waited {now - self._waiting_since:.1f} s"
      self._fail(
        "CoordinatorError",
        f"Replica {self._config.replica!r} {waited} {self.missing(now)}.",
      )

  def missing(self, now: float) -> str:
    """What this replica waits for, and why it does not come, for people."""
    view, awaited = self.view, self.applier.awaits
    if not self._store.reached:
      return "for the job's store, which has not answered yet"
    if self.incarnation < 0:
      what = "for admission to the run"
    elif awaited:
      what = f"for {awaited}"
    elif self.session.waits:
      what = f"for the commit of step {view.step}"
    elif msg.Leave in self._wishes:
      what = "for the confirmation that it may leave"
    elif msg.Finish in self._wishes or view.ended is not None:
      what = "for the end of the run"
    else:
      what = f"for nothing (it has step {self.applier.step})"
    leader = view.of_process(view.leader)
    if leader is None:
      who = "there is no leader"
    elif self._link:
      who = f"its leader is replica {leader.replica!r}"
    else:
      who = f"it has lost its leader, replica {leader.replica!r}"
    heard = "no leader has sent a message yet"
    if self._heard is not None:
      at, message = self._heard
      heard = f"its last message came {now - at:.1f} s ago ({message})"
      if leader is None:
        heard = f"the last message of one came {now - at:.1f} s ago ({message})"
    texts = [what, who, heard, self._missing]
    if self._store.silent:
      texts.append("the store does not answer")
    if self.incarnation < 0:
      texts.append(
        "if all other replicas have died, start the job again from a checkpoint"
      )
    return "; ".join(text for text in texts if text)
