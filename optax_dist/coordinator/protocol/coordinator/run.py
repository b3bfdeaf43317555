"""A run: its members, their states, and how it ends.

    calls -> Comparison        which job the run has, if they differ
          -> Members           which replicas are members
          -> Steps             gradients, rounds, commits
          -> Snapshots         which member serves the state to which
          -> Holders           which lost replica may come back with the state
          -> Ending            whether the run ends, and its last message

A run's state follows from the log (`History`) and from its members' messages. So a
coordinator that starts again can continue: the members in the log call it within a
deadline, stay members, and submit again.
"""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.comparison import (
  Comparison,
  Verdict,
  difference,
)
from optax_dist.coordinator.protocol.coordinator.ending import Ending
from optax_dist.coordinator.protocol.coordinator.fingerprints import (
  Fingerprints,
)
from optax_dist.coordinator.protocol.coordinator.holders import Holders
from optax_dist.coordinator.protocol.coordinator.hosts import Absent, Hosts
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.snapshots import Snapshots
from optax_dist.coordinator.protocol.coordinator.steps.consequences import (
  Consequence,
  Evict,
  Fail,
)
from optax_dist.coordinator.protocol.coordinator.steps.steps import Steps
from optax_dist.coordinator.protocol.entries import (
  Began,
  Change,
  Joined,
  Member,
  Process,
  Removed,
  ReplicaId,
  run_id,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.inputs import Input

# Messages that don't change which members wait (`Members.waiting`).
_WAIT_NO_LESS = frozenset((msg.SubmitGradient, msg.Done))


class Run:
  """A run, continued from its log.

  Attributes:
    begins_again: the state and job from which the run has to begin again, because no
      replica has its latest state, or most replicas have another job; None if the run
      goes on.
  """

  def __init__(
    self,
    config: Config,
    history: History,
    hosts: Hosts,
    out: Outbox,
    now: float,
  ):
    """Continues where the log ends.

    Args:
      config: the run's.
      history: all decisions in the log; kept up to date.
      hosts: the launchers, which know which processes have ended.
      out: collects what is written and sent.
      now: the time.
    """
    self._config, self._history, self._out = config, history, out
    self._now = now
    self._members = Members()
    # The launchers, and the last of their reports that was handled.
    self._hosts, self._absent = hosts, Absent()
    self._steps = Steps(config, history, self._members, out)
    self._snapshots = Snapshots(history.epoch, history.step, self._members, out)
    until = now + config.deadlines.reconnect
    self._ending = Ending(
      *(config, history, hosts, self._members, self._steps),
      *(self._snapshots, out, until),
    )
    # Processes whose gradients are wrong, and why.
    self._wrong: dict[Process, str] = {}
    self._comparison = Comparison()
    self._fingerprints = Fingerprints(out)
    self.begins_again: Began | None = None
    self._holders = Holders(config, history, self._members, out)
    for member in history.members.values():
      self._members.add(MemberState(member, until=until))
    self._steps.at(now)
    self._steps.begin(until)

  def step(self, input_: Input, now: float) -> None:
    """Handles an input, and does what is due."""
    self._now = now
    self._steps.at(now)
    match input_:
      case ins.Received(peer, message):
        if type(message) not in _WAIT_NO_LESS:
          self._members.changed()
        self._receive(peer, message)
      case ins.PeerLost(peer, how, reason):
        self._lost(peer, how, reason)
    if self._absent is not self._hosts.absent:
      self._absent = self._hosts.absent
      self._never_joined(self._absent)
    self._run_pending()

  def deadline(self) -> float:
    """When `step` must be called, at the latest."""
    if self._ending.is_over:
      return math.inf
    times = self._steps.deadlines()
    if self._comparison.calls and self._now < self._comparison.until:
      times.append(self._comparison.until)
    all_here = all(s.is_connected for s in self._members.waiting())
    if self._snapshots.lacking_since is not None and all_here:
      times += self._holders.deadlines(self._snapshots.lacking_since)
    times += self._ending.deadlines(self._now)
    for state in self._members.waiting():
      times.append(state.until)
      if state.leaving is not None:
        times.append(state.leaving[1] + self._config.deadlines.transfer)
    return min(times)

  def _lost(self, peer: Process, how: str, reason: str) -> None:
    """Handles the loss of a connection."""
    self._comparison.calls.pop(peer, None)
    self._holders.lost(peer, how, self._now)
    self._ending.addresses.pop(peer, None)
    state = self._members.of_process(peer)
    if state is not None and state.is_connected:
      # Marked as not connected, so that `_remove` sends nothing: the process is gone,
      # or has called on a new connection, which must stay open.
      state.until = self._now
      self._remove(state, f"its connection was lost: {reason}")

  def _never_joined(self, report: Absent) -> None:
    """Counts replicas as lost that have ended before they joined.

    If the run needs them and they are not started again, the run ends at once: before
    the first step nothing is lost by that.
    """
    for process in report.members:
      member = self._members.of_process(process)
      if member is not None:
        self._remove(member, "its process has ended")
    self._steps.never_joined(report.replicas)
    enough = self._steps.ruling.can_be_enough
    if report.given_up and self._history.has_no_commits and not enough:
      text = f"The run needs replicas that have never joined: {report.given_up}"
      self._ending.record(text, "CoordinatorError")

  # Messages.

  def _receive(self, peer: Process, message: msg.Message) -> None:
    if isinstance(message, msg.Hello):
      self._hello(peer, message)
      return
    state = self._members.of_process(peer)
    if self._ending.is_over:
      address = self._ending.addresses.get(peer)
      if address is not None and isinstance(message, msg.NeedsSnapshot):
        self._snapshots.serve_final(peer, address, self._steps.step)
      return
    if state is None or not state.is_connected:
      return  # The sender was removed, and does not know it yet.
    match message:
      case msg.SubmitGradient():
        self._steps.intake.arrive(state, message)
      case msg.Done() | msg.Failed():
        self._steps.reported(state, message)
      case msg.Applied(step):
        state.has_applied(step)
      case msg.NeedsSnapshot(step):
        state.needs, state.applied, state.fetches = True, step, False
        if state.server is not None:
          state.tried.add(state.server)
          state.server = None
      case msg.Leave():
        self._leave(state, message)
      case msg.Finish(reason):
        self._ending.finish(reason)
      case msg.Save():
        self._steps.gradients.saving = True
      case msg.SetHyperparams(values, number):
        self._steps.gradients.set_hyperparams(Change(peer, number, values))
      case msg.Fingerprint(step, digest):
        # The fingerprint takes a while: the member had this state, although its
        # latest report may be older, or it may need a snapshot by now.
        state.applied = max(state.applied, step)
        replica = state.member.replica
        why = self._fingerprints.compare(replica, step, digest)
        if why:
          self._ending.record(why, "Diverged")
      case _:
        kind = type(message).__name__
        text = f"{kind} is not for a coordinator"
        self._out.add(fx.Log(f"{peer} sent a forged message: {text}"))
        self._out.send(peer, msg.Rejected(text))

  # Calls.

  def _hello(self, peer: Process, hello: msg.Hello) -> None:
    if peer in self._wrong:
      name, why = hello.replica, self._wrong[peer]
      text = f"The job refuses replica {name!r}: {why}."
      self._out.send(peer, msg.Refused(text, again=True))
      return
    why = difference(self._config.job, hello.job)
    if why:
      self._differs(peer, hello, why)
      return
    history = self._history
    if (
      (history.has_no_commits or hello.beginnings == history.beginnings)
      and not history.has_committed
      and history.ended is None
      and hello.start.step > history.step
    ):
      # Before this coordinator's first commit, the run goes on from the newest state
      # that a replica brings. The log may lack the steps up to that state, if its host
      # has lost power.
      self.begins_again = Began(hello.start, self._config.job)
      return
    self._ending.addresses[peer] = hello.address
    state = self._members.of_process(peer)
    if (
      state is not None
      and not state.is_connected
      and state.member.incarnation == hello.incarnation
      and not self._is_of_another_history(hello)
    ):
      state.reconnected(hello.applied)
      state.start = hello.start
      self._members.changed()
      self._welcome(peer, hello, hello.incarnation)
      self._steps.reconnected(state, hello)
      return
    if self._history.ended is not None and self._is_of_one_program(hello):
      self.begins_again = Began(hello.start, hello.job)
      return
    if self._ending.is_over or self._ending.since is not None:
      if state is not None:
        self._called_again(state)
      self._welcome(peer, hello, -1)
      return
    rival = self._members.of_replica(hello.replica)
    if rival is not None and rival.member.process != peer:
      if rival.member.incarnation > hello.incarnation >= 0:
        # The process with the later membership stays; otherwise the two processes
        # would replace each other indefinitely.
        self._out.send(peer, _taken(hello.replica))
        return
      if rival.is_connected and (rival.rival != peer or self._has_alone(rival)):
        # Most likely one of the two processes is dead, and this call may be a late one
        # of the dead process. A live process calls again.
        rival.rival = peer
        why = f"another process is replica {hello.replica!r}"
        self._out.add(fx.Disconnect(peer, why))
        return
    if state is not None:
      self._called_again(state)
    self._admit(peer, hello)

  def _called_again(self, state: MemberState) -> None:
    """Removes a membership that its process does not know of, or no more."""
    state.until = self._now  # So `_remove` leaves this new connection open.
    self._remove(state, "its process has called again")

  def _has_alone(self, state: MemberState) -> bool:
    """Whether a member is the only one with the state after the last commit."""
    step = self._steps.step
    others = [s for s in self._members if s is not state]
    return not self._history.has_no_commits and not any(
      other.has(step) for other in others
    )

  def _differs(self, peer: Process, hello: msg.Hello, why: str) -> None:
    """Handles the call of a replica with another job, which may be the right one."""
    until = self._now + self._config.deadlines.reconnect
    self._comparison.add(peer, hello, until)
    self._compare()
    if peer in self._comparison.calls and self.begins_again is None:
      text = (
        f"replica {hello.replica!r} does not agree with those before: {why}. The run"
        " has the job of more than half of its replicas, once so many have called"
      )
      self._out.send(peer, msg.Stalled(self._steps.step, 0.0, text))
      self._warn_all(text)

  def _compare(self) -> None:
    """Decides which job the run has, if those of its replicas differ."""
    calls, history = self._comparison.calls, self._history
    verdict: Verdict | None = Verdict()
    if calls and history.has_no_commits and not self._ending.is_over:
      members = [state.member.replica for state in self._members]
      ruling = self._steps.ruling
      needed, absent = ruling.state.replicas_needed, ruling.never_came
      verdict = self._comparison.verdict(
        self._config.job, members, needed, absent, self._now
      )
    self._steps.intake.has_job = verdict == Verdict()
    if verdict is None:
      return
    if verdict.other is not None:
      self.begins_again = Began(verdict.other.start, verdict.other.job)
      return
    tie = verdict.tie
    if tie:
      self._ending.record(tie, "CoordinatorError")
    for peer, hello in calls.items():
      why = (tie or difference(self._config.job, hello.job)).rstrip(".")
      is_there = any(state.is_connected for state in self._members)
      if not (is_there or history.has_no_commits):
        why += (
          f". That job is in the coordinator's log, with {history.step} steps, and no"
          " replica of it is there. Another job needs a log, an address or a run name"
          " of its own"
        )
      self._out.send(peer, msg.Refused(why))
      self._warn_all(f"replica {hello.replica!r} may not join: {why}")
    refused = [hello.replica for hello in calls.values()]
    calls.clear()
    # A refused process ends, like one that has died before it joined.
    self._steps.never_joined(refused)

  def _warn_all(self, text: str) -> None:
    """Warns of a job that differs; also warns members, while their job may be wrong."""
    self._out.add(fx.Log(text))
    if self._history.has_no_commits:
      stalled = msg.Stalled(self._steps.step, 0.0, text)
      self._out.notify_all(self._members, stalled)

  def _is_of_one_program(self, hello: msg.Hello) -> bool:
    """Whether all memberships of the run are closed ones of the caller's own program.

    This is so when a notebook's cell runs again, which means to start another run.
    """
    history = self._history
    ids = {run_id(history.nonce, n + 1) for n in range(history.beginnings)}
    closed = {incarnation for run, incarnation in hello.follows if run in ids}
    known = {*range(history.next_incarnation)}
    return bool(known) and known <= closed

  def _is_of_another_history(self, hello: msg.Hello) -> bool:
    """Whether a process has followed steps that are not in this log."""
    history = self._history
    if hello.beginnings != history.beginnings:
      return True
    return history.has_lost(hello.epoch, hello.read)

  def _welcome(
    self,
    peer: Process,
    hello: msg.Hello,
    incarnation: int,
    ends_in: float | None = None,
  ) -> None:
    """Sends the commits that a process has missed, then `Welcome`."""
    history = self._history
    anew = self._is_of_another_history(hello)
    for commit in () if anew else history.since(hello.read) or ():
      self._out.send(peer, commit)
    self._out.send(
      peer,
      msg.Welcome(
        history.epoch,
        history.nonce,
        history.beginnings,
        history.origin,
        incarnation,
        history.step,
        history.progress,
        anew,
        len(history.members) < 2,
        ends_in,
        history.changes.get(peer, 0),
      ),
    )
    if history.ended is not None:
      self._out.send(peer, history.ended)

  def _admit(self, peer: Process, hello: msg.Hello) -> None:
    old = self._members.of_replica(hello.replica)
    if old is not None:
      self._out.notify(old, _taken(hello.replica))
      self._remove(old, "replaced")
    incarnation = self._history.next_incarnation
    member = Member(incarnation, hello.replica, peer, hello.address)
    self._out.append(Joined(member))
    for state in self._members.waiting():
      if state.leaving is not None:  # The new member may need its state.
        state.leaving = state.leaving[0], self._now
    state = MemberState(member, start=hello.start)
    step = self._steps.step
    if hello.start.step > step:
      text = (
        f"replica {member.replica!r} has brought the state of step"
        f" {hello.start.step}, which is not used: the run is at step {step}, and"
        f" began from step {self._history.origin.step}"
      )
      self._out.add(fx.Log(text))
    self._out.note(
      journal_events.Join(
        member.replica, step, member.incarnation, member.address
      )
    )
    ends_in = self._steps.intake.ends_in(member)
    self._welcome(peer, hello, incarnation, ends_in)
    self._members.add(state)
    self._steps.joined(state)

  # Departures.

  def _leave(self, state: MemberState, leave: msg.Leave) -> None:
    member, step = state.member, self._steps.step
    if not leave.lost:
      if state.leaving is None:
        state.leaving = (step, self._now)
        self._steps.rounds.void_early()
      return
    self._holders.has_ended(member.process)
    reason = leave.reason
    if leave.stacks:
      self._out.note(
        journal_events.Stuck(
          member.replica, step, reason, leave.stacks, member.incarnation
        )
      )
    self._remove(state, reason)
    if leave.final and not self._steps.ruling.can_be_enough:
      text = f"Step {step} needs replica {member.replica!r}, which is lost: {reason}."
      self._ending.record(text, "CoordinatorError")

  def _remove(
    self, state: MemberState, reason: str, left: bool = False
  ) -> None:
    """Removes a member that has left, or is lost."""
    incarnation = state.member.incarnation
    if not self._members.remove(incarnation) or self._ending.is_over:
      return
    entry = Removed(incarnation, left, reason)
    self._out.append(entry)
    member, step = state.member, self._steps.step
    note: journal_events.Record = journal_events.Lost(
      member.replica, step, incarnation, reason
    )
    if left:
      note = journal_events.Leave(member.replica, step, incarnation)
    self._out.note(note)
    if state.is_connected:
      self._out.notify(state, entry)
      self._out.add(
        fx.Disconnect(member.process, "it was removed from the run")
      )
    # If the last member leaves while other replicas may still come, it counts as lost:
    # otherwise the quorum would be lowered to zero, and the run would end successfully.
    is_last = not self._members and self._ending.some_may_come(self._now)
    self._steps.removed(state, left and not is_last)

  def _complete_departures(self) -> None:
    """Lets replicas leave once all other members have their state."""
    for state in self._members.waiting():
      if state.leaving is None:
        continue
      step, since = state.leaving
      late = [s for s in self._members if s.leaving is None and not s.has(step)]
      for other in late:
        self._snapshots.request_report(other, self._steps.step)
      last = len(self._members) == 1
      waits = bool(late) or (last and self._ending.some_may_come(self._now))
      if not waits or self._now >= since + self._config.deadlines.transfer:
        self._remove(state, "left", left=True)
    self._ending.check_empty(self._now)

  # States.

  def _wait_for_state(self) -> None:
    """Begins the run again if no replica is left that has its latest state.

    The run begins from the newest state that a member has: a checkpoint's state, the
    state of an earlier step, or before the first step any start state.
    """
    since = self._snapshots.lacking_since
    if since is None or any(not s.is_connected for s in self._members):
      return
    key = lambda state: (state.start.step, -state.member.incarnation)
    newest = max(self._members, key=key)
    if not self._holders.wait(newest.start.step, since, self._now):
      self.begins_again = Began(newest.start, self._config.job)

  def _end_of_data(self) -> None:
    """Ends the run when the remaining data doesn't fill a step."""
    policy = self._steps.policy
    if policy.exhausted and self._steps.rounds.current is None:
      wrong = policy.lost_samples(self._config.rules.max_skipped)
      if wrong and self._ending.since is None:
        self._ending.record(wrong, "CoordinatorError")
      else:
        self._ending.finish("all data is used")

  # What follows.

  def _run_pending(self) -> None:
    """Does what follows from an input, and from the time."""
    self._compare()
    consequences = self._steps.consequences
    # A run that begins again makes no further decision.
    while not (self._ending.is_over or self.begins_again):
      self._check()
      if not consequences:
        break
      self._follow(consequences.pop(0))
    else:
      consequences.clear()
    if self._ending.is_over:
      self._compare()  # Refuses the calls that waited for a verdict.
    # Fills the cache of `Members`, so that runs in equal states compare equal.
    self._members.waiting()

  def _check(self) -> None:
    """Does what the time allows, as long as nothing else has to be done first."""
    for state in self._members.waiting():
      if self._now >= state.until:
        self._remove(state, "it did not reconnect to the coordinator in time")
    self._complete_departures()
    steps, consequences = self._steps, self._steps.consequences
    if not (consequences or self._ending.is_over):
      steps.check()
    if not consequences:
      self._end_of_data()
    if consequences or self._ending.is_over:
      return
    current, intake = steps.rounds.current, steps.intake
    waits = bool(intake.queue) or current is not None
    self._snapshots.request_reports(steps.step, waits and not intake.has_state)
    at_least = steps.step + (current is not None and current.is_announced)
    self._snapshots.serve(steps.step, at_least, self._now)
    self._wait_for_state()
    if not self.begins_again:
      self._ending.check(self._now)

  def _follow(self, consequence: Consequence) -> None:
    """Does what the steps have found to be necessary."""
    match consequence:
      case Evict(incarnation, reason, wrong):
        state = self._members.get(incarnation)
        if state is not None:
          if wrong:
            self._wrong[state.member.process] = reason
          self._remove(state, reason)
      case Fail(reason):
        # The missing replicas may be among those whose job differs, and which wait for
        # a verdict.
        for hello in self._comparison.calls.values():
          why = difference(self._config.job, hello.job)
          reason += f" Replica {hello.replica!r} has called, but {why}."
        self._ending.record(reason, "CoordinatorError")


def _taken(replica: ReplicaId) -> msg.Refused:
  return msg.Refused(
    f"Another process has joined as replica {replica!r}, and takes the place of"
    " this one. If both are wanted, they need numbers of their own.",
    again=True,
  )
