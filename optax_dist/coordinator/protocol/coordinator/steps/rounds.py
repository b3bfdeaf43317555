"""Rounds for a step's mean: who takes part, and who has yet to report.

    announced early, before gradients --all have begun it--> begun
    announced, once the rules have chosen gradients -------> begun
      |  Done of every member                     |  Done of a member, once the
      v                                           v  witness has the mean
    quorum.Done for all of them                 quorum.Done for it

What a `Round` and the `Rounds` of a step return are events for the quorum's rules.
A round ends when these commit the step or abandon it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Part,
  RoundId,
)
from optax_dist.quorum.events import ordered

# Rounds that may fail between the same two members.
_STRIKES = 3
# A replica that is more steps behind gets a snapshot instead of means; one that
# has just got a snapshot is given more time to catch up.
_MAX_LAG = 8
_MAX_LAG_AFTER_SNAPSHOT = 32


class Round:
  """The round whose mean the rules wait for.

  Attributes:
    message: what its members and readers were told.
    number: how the rules call it.
    began: when it began.
    is_told: whether members know of it; it waits while nobody has the state.
    holders: who has said that it has the mean.
  """

  def __init__(
    self, message: msg.Round, number: int, now: float, is_told: bool = True
  ):
    self.message, self.number, self.began = message, number, now
    self.is_told = is_told
    self.holders: list[Incarnation] = []
    # The replica that must also get the mean; None once it has.
    self._witness = message.witness
    # Reports that are held back until the witness has the mean; or all members, if
    # the round may be repeated since it is an early one.
    self._held: list[quorum.Done] = []

  @property
  def id(self) -> RoundId:
    """Its id."""
    return self.message.round

  def done(self, incarnation: Incarnation) -> list[quorum.Done]:
    """A member or the witness has the mean; returns what counts now."""
    self.holders.append(incarnation)
    if incarnation == self._witness:
      return self._witnessed()
    own = [
      quorum.Done(part.replica, self.id.step, self.number)
      for part in self.message.parts
      if part.incarnation == incarnation
    ]
    if self._witness is None and not self.id.early:
      return own
    self._held += [report for report in own if report not in self._held]
    all_done = self.id.early and len(self._held) == len(self.message.parts)
    return self._witnessed() if all_done else []

  def failed(
    self, state: MemberState, message: msg.Failed, essential: bool
  ) -> Sequence[quorum.Event]:
    """A member or the witness can't complete it.

    Args:
      state: who.
      message: what it says.
      essential: whether the witness is the only one that can apply the step.
    """
    parts = self.message.parts
    named = [
      part.replica
      for part in parts
      if part.incarnation == message.failed_replica
    ]
    failed = named[0] if named else None
    if state.member.incarnation == self._witness:
      if not essential:
        return self._witnessed()
      return self.impossible(failed)
    return [self._failure(state.member.replica, failed)]

  def _failure(
    self, replica: quorum.Replica, failed: quorum.Replica | None
  ) -> quorum.Failed:
    return quorum.Failed(replica, self.id.step, self.number, failed)

  def lost(
    self, incarnation: Incarnation, essential: bool
  ) -> Sequence[quorum.Event]:
    """Stops waiting for a member that was removed."""
    if incarnation != self._witness:
      return []
    return self.impossible() if essential else self._witnessed()

  def impossible(
    self, failed: quorum.Replica | None = None
  ) -> list[quorum.Event]:
    """Nobody has the state that its step would be applied to."""
    first = self.message.parts[0].replica
    return [self._failure(first, failed or first)]

  def _witnessed(self) -> list[quorum.Done]:
    self._witness = None
    held, self._held = self._held, []
    return held


class Rounds:
  """Has members aggregate a step, until the quorum's rules commit it.

  Attributes:
    current: the round whose mean the rules wait for, or None.
  """

  def __init__(self, epoch: int, members: Members, out: Outbox):
    """Starts without a round.

    Args:
      epoch: the coordinator's.
      members: the members.
      out: where announcements go.
    """
    self.current: Round | None = None
    self._epoch, self._members, self._out = epoch, members, out
    # How many were announced for a step: an id is used once.
    self._numbers: collections.Counter[int] = collections.Counter()
    # A round that was announced before its gradients have come; and the reports
    # of it, since members are faster than another member's gradient.
    self._early: msg.Round | None = None
    self._reports: dict[Incarnation, msg.Done | msg.Failed] = {}
    # How often rounds have failed between two members, at this step.
    self._strikes: collections.Counter[frozenset[Incarnation]] = (
      collections.Counter()
    )

  def announce_early(self, step: int) -> None:
    """Tells all members that the next step is the mean of all.

    Each begins with its next gradient, and a step takes a round trip less.
    """
    states = sorted_by_replica(self._members)
    parts = tuple(
      [
        Part(s.member.incarnation, s.member.replica, 0, step, 0, 1, 1.0)
        for s in states
      ]
    )
    peers = tuple([state.member for state in states])
    self._early = msg.Round(self._next(step, early=True), parts, peers)
    self._out.tell_all(states, self._early)

  def void_early(self) -> None:
    """Somebody has gone, or a gradient won't come: another round follows."""
    if self._early is not None:
      self._cancel(self._early)
      self._early = None
      self._reports.clear()

  def begin(
    self,
    step: int,
    number: int,
    parts: tuple[Part, ...],
    early: Sequence[RoundId | None],
    now: float,
  ) -> list[quorum.Event]:
    """Begins a round; returns what follows from earlier reports.

    Args:
      step: the step.
      number: how the rules call it.
      parts: its gradients.
      early: the early rounds that these were submitted for.
      now: the time.
    """
    announced, reports = self._early, self._reports
    self._early, self._reports = None, {}
    if announced is not None:
      ids = {part.incarnation for part in announced.parts}
      whole = ids == {part.incarnation for part in parts}
      if whole and set(early) == {announced.round}:
        message = msg.Round(announced.round, parts, announced.peers)
        self.current = Round(message, number, now)
        events: list[quorum.Event] = []
        for incarnation, report in reports.items():
          state = self._members.get(incarnation)
          if state is not None:
            events += self.reported(state, report, now)
        return events
      self._cancel(announced)
    self._announce(step, number, parts, now)
    return []

  def _announce(
    self, step: int, number: int, parts: tuple[Part, ...], now: float
  ) -> None:
    inside = [self._members[part.incarnation] for part in parts]
    readers, lag = self._readers(step, {id(state) for state in inside})
    witness = None
    # The only copy of a committed step would be lost with its process; and
    # somebody must have the state that it is applied to.
    if len(parts) == 1 or not any(s.has(step) for s in inside):
      able = [s for s in readers if not s.needs]
      key = lambda s: (s.applied, s.member.incarnation)
      best = max(able, key=key, default=None)
      witness = None if best is None else best.member.incarnation
    message = msg.Round(
      self._next(step),
      parts,
      tuple([state.member for state in inside]),
      tuple([state.member for state in readers]),
      witness,
      lag,
    )
    # Or the step might be committed, and nobody could take it.
    is_told = self._members.have(step)
    self.current = Round(message, number, now, is_told)
    if is_told:
      self._out.tell_all([*inside, *readers], message)

  def _readers(
    self, step: int, inside: set[int]
  ) -> tuple[list[MemberState], int]:
    """Who else gets the mean, and how far the last of them is behind."""
    readers, lag = [], 0
    for state in self._members:
      behind = step - state.applied
      limit = _MAX_LAG if state.server is None else _MAX_LAG_AFTER_SNAPSHOT
      late = state.applied < 0 or behind > limit
      if id(state) in inside or late or not state.is_connected:
        continue
      if state.needs and state.server is None:
        continue
      readers.append(state)
      lag = max(lag, behind)
    return readers, lag

  def _next(self, step: int, early: bool = False) -> RoundId:
    for old in [s for s in self._numbers if s < step]:
      del self._numbers[old]
    self._numbers[step] += 1
    return RoundId(self._epoch, step, self._numbers[step], early)

  def _cancel(self, message: msg.Round) -> None:
    told = [p.incarnation for p in (*message.peers, *message.readers)]
    states = [s for s in map(self._members.get, told) if s is not None]
    self._out.tell_all(states, msg.Cancel(message.round))

  def reported(
    self, state: MemberState, message: msg.Done | msg.Failed, now: float
  ) -> Sequence[quorum.Event]:
    """A member or witness says how a round has ended for it."""
    current, incarnation = self.current, state.member.incarnation
    if current is None:
      if self._early is not None and message.round == self._early.round:
        self._reports[incarnation] = message
    elif message.round != current.id:
      pass
    elif isinstance(message, msg.Done):
      return current.done(incarnation)
    elif current.id.early:
      # Others may not have had a gradient yet: nobody has failed.
      parts = current.message.parts
      self._announce(current.id.step, current.number, parts, now)
    else:
      return current.failed(state, message, self._is_essential(current))
    return []

  def tell_waiting(self, now: float) -> None:
    """Announces a round that has waited for a member with the state."""
    current = self.current
    if current is not None and not current.is_told:
      step, parts = current.id.step, current.message.parts
      if self._members.have(step):
        self._announce(step, current.number, parts, now)

  def repeat_early(self, now: float) -> None:
    """Announces a round again that all have begun early, with deadlines now."""
    current = self.current
    if current is not None and current.id.early:
      step, parts = current.id.step, current.message.parts
      self._announce(step, current.number, parts, now)

  def _is_essential(self, current: Round) -> bool:
    """Whether only the witness has the state that the step is applied to."""
    states = [self._members.get(p.incarnation) for p in current.message.parts]
    return not any(s is not None and s.has(current.id.step) for s in states)

  def deadline(self, patience: float) -> float:
    """When to call `repeat_early`."""
    current = self.current
    if current is None or not current.id.early:
      return math.inf
    return current.began + patience

  def strike(
    self, state: MemberState, message: msg.Failed
  ) -> MemberState | None:
    """Counts a failure between two members that are not known to be dead.

    Returns:
      The one that was reported, when there are too many; once in a step.
    """
    failed = self._members.get(
      -1 if message.failed_replica is None else message.failed_replica
    )
    if failed is None or failed is state:
      return None
    pair = frozenset((state.member.incarnation, failed.member.incarnation))
    self._strikes[pair] += 1
    return failed if self._strikes[pair] == _STRIKES else None

  def lost(self, incarnation: Incarnation) -> Sequence[quorum.Event]:
    """Stops waiting for a member that was removed."""
    current = self.current
    if current is None:
      return []
    events = current.lost(incarnation, self._is_essential(current))
    if (
      not events and current.is_told and not self._members.have(current.id.step)
    ):
      return current.impossible()
    return events

  def end(self, cancel: bool) -> Round | None:
    """Ends the current round, and returns it.

    Args:
      cancel: whether its members are told: it is not committed.
    """
    current, self.current = self.current, None
    if cancel and current is not None and current.is_told:
      self._cancel(current.message)
    return current

  def committed(self) -> None:
    """The step is committed: what was counted for it is void."""
    self._strikes.clear()


def sorted_by_replica(members: Members) -> list[MemberState]:
  """The members, in the order of their replicas."""
  by_replica = {state.member.replica: state for state in members}
  return [by_replica[replica] for replica in ordered(by_replica)]
