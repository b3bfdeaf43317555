"""Rounds for a step's mean: who takes part, and who has yet to report.

    announced early, before gradients --all have begun it--> begun
    announced, once the rules have chosen gradients -------> begun
      |
      v  all members and the witness have the mean
    quorum.Done

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
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Member,
  Part,
  ReplicaId,
  RoundId,
)
from optax_dist.quorum.events import ordered

# Rounds that may fail between the same two members.
_STRIKES = 3
# A replica that is more steps behind gets a snapshot instead of means; one that
# has just got a snapshot is given more time to catch up.
_MAX_LAG = 8
_MAX_LAG_AFTER_SNAPSHOT = 32
# A replica that steps alone sends a newcomer each mean, and could take steps faster
# than that. It does so this often while the newcomer fetches its state.
_ALONE = 4


class Round:
  """The aggregation of a step, by one announcement of it.

  Attributes:
    message: what its members and readers were sent.
    number: how the rules call it; 0 as long as they have not chosen its gradients.
    began: when they have.
    is_announced: whether members know of it; it waits while nobody has the state.
    holders: who has said that it has the mean.
    has_failed: whether a member could not complete it before it has begun.
  """

  def __init__(
    self,
    message: msg.Round,
    number: int = 0,
    now: float = 0.0,
    is_announced: bool = True,
  ):
    self.message, self.number, self.began = message, number, now
    self.is_announced, self.has_failed = is_announced, False
    self.holders: set[Incarnation] = set()
    self._awaited = {part.incarnation for part in message.parts}
    if message.witness is not None:
      self._awaited.add(message.witness)

  @property
  def id(self) -> RoundId:
    """Its id."""
    return self.message.round

  def begin(self, number: int, parts: tuple[Part, ...], now: float) -> None:
    """The gradients have come for which it was announced early."""
    self.message = msg.Round(self.id, parts, self.message.peers)
    self.number, self.began = number, now

  def completed(self) -> list[quorum.Done]:
    """What the rules have to know, once all have the mean that must."""
    if not self.number or not self._awaited <= self.holders:
      return []
    return [quorum.Done(self.id.step, self.number)]

  def awaits(self, incarnation: Incarnation) -> bool:
    """Whether this one must have the mean, and has not said that it has."""
    return incarnation in self._awaited - self.holders

  def go_without(self, witness: Incarnation) -> list[quorum.Done]:
    """The witness need not have the mean any more."""
    self._awaited.discard(witness)
    return self.completed()

  def failure(self, failed: ReplicaId) -> list[quorum.Failed]:
    """It can't be completed, because of this replica."""
    return [quorum.Failed(self.id.step, self.number, failed)]


class Rounds:
  """Has members aggregate a step, until the quorum's rules commit it.

  Attributes:
    current: the round whose mean the rules wait for, or None.
  """

  def __init__(
    self, epoch: int, limits: Deadlines, members: Members, out: Outbox
  ):
    """Starts without a round.

    Args:
      epoch: the coordinator's.
      limits: how long it waits.
      members: the members.
      out: where announcements go.
    """
    self._limits = limits
    self.current: Round | None = None
    self._epoch, self._members, self._out = epoch, members, out
    # How many were announced for a step: an id is used once.
    self._numbers: collections.Counter[int] = collections.Counter()
    # A round that was announced before its gradients have come.
    self._early: Round | None = None
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
    self._early = Round(msg.Round(self._next(step, early=True), parts, peers))
    self._out.notify_all(states, self._early.message)

  def void_early(self) -> None:
    """Somebody has gone, or a gradient won't come: another round follows."""
    if self._early is not None:
      self._cancel(self._early)
      self._early = None

  def begin(
    self,
    step: int,
    number: int,
    parts: tuple[Part, ...],
    early: Sequence[RoundId | None],
    now: float,
  ) -> Sequence[quorum.Event]:
    """Begins a round; returns what follows from earlier reports.

    Args:
      step: the step.
      number: how the rules call it.
      parts: its gradients.
      early: the early rounds that these were submitted for.
      now: the time.
    """
    announced, self._early = self._early, None
    if announced is not None:
      before = {part.incarnation for part in announced.message.parts}
      is_whole = before == {part.incarnation for part in parts}
      if is_whole and set(early) == {announced.id} and not announced.has_failed:
        announced.begin(number, parts, now)
        self.current = announced
        return announced.completed()
      self._cancel(announced)
    self._announce(step, number, parts, now)
    return []

  def _announce(
    self, step: int, number: int, parts: tuple[Part, ...], now: float
  ) -> None:
    of = dict.fromkeys(part.incarnation for part in parts)
    owners = [self._members[incarnation] for incarnation in of]
    readers, lag = self._readers(step, {id(state) for state in owners})
    witness = None
    # The only copy of a committed step would be lost with its process; and
    # somebody must have the state that it is applied to.
    if len(owners) == 1 or not any(s.has(step) for s in owners):
      able = [s for s in readers if not s.needs or step - s.applied >= _ALONE]
      key = lambda s: (s.applied, s.member.incarnation)
      best = max(able, key=key, default=None)
      witness = None if best is None else best.member.incarnation
    message = msg.Round(
      self._next(step),
      parts,
      tuple([state.member for state in owners]),
      tuple([state.member for state in readers]),
      witness,
      lag,
    )
    # Or the step might be committed, and nobody could take it.
    is_announced = self._members.have(step)
    self.current = Round(message, number, now, is_announced)
    if is_announced:
      self._out.notify_all([*owners, *readers], message)

  def _readers(
    self, step: int, owners: set[int]
  ) -> tuple[list[MemberState], int]:
    """Who else gets the mean, and how far the last of them is behind."""
    readers, lag = [], 0
    for state in self._members:
      behind = step - state.applied
      limit = _MAX_LAG if state.server is None else _MAX_LAG_AFTER_SNAPSHOT
      late = state.applied < 0 or behind > limit
      if id(state) in owners or late or not state.is_connected:
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

  def _cancel(self, round_: Round) -> None:
    members = (*round_.message.peers, *round_.message.readers)
    states = [self._members.get(member.incarnation) for member in members]
    there = [state for state in states if state is not None]
    self._out.notify_all(there, msg.Cancel(round_.id))

  def reported(
    self, state: MemberState, message: msg.Done | msg.Failed, now: float
  ) -> Sequence[quorum.Event]:
    """A member or witness says how a round has ended for it."""
    current, early = self.current, self._early
    incarnation, replica = state.member.incarnation, state.member.replica
    if early is not None and message.round == early.id:
      # Members are faster than another member's gradient.
      early.has_failed |= isinstance(message, msg.Failed)
      early.holders.add(incarnation)
    if current is None or message.round != current.id:
      return []
    if isinstance(message, msg.Done):
      current.holders.add(incarnation)
      return current.completed()
    parts = current.message.parts
    if current.id.early:
      # Others may not have had a gradient yet: nobody has failed.
      self._announce(current.id.step, current.number, parts, now)
      return []
    named = [p for p in parts if p.incarnation == message.failed_replica]
    failed = named[0].replica if named else replica
    if incarnation == current.message.witness:
      return self._witness_lost(current, failed)
    return current.failure(failed)

  def _witness_lost(
    self, current: Round, failed: ReplicaId
  ) -> Sequence[quorum.Event]:
    """The witness won't have the mean, which others get all the same."""
    witness = current.message.witness
    assert witness is not None
    states = [self._members.get(p.incarnation) for p in current.message.parts]
    step = current.id.step
    if not any(s is not None and s.has(step) for s in states):
      # Nobody else has the state that the step is applied to.
      return current.failure(failed)
    return current.go_without(witness)

  @property
  def awaited(self) -> tuple[ReplicaId, ...]:
    """The members that must have the mean, and have not said that they have."""
    if self.current is None:
      return ()
    message, awaits = self.current.message, self.current.awaits
    all_ = (*message.peers, *message.readers)
    return tuple(
      member.replica for member in all_ if awaits(member.incarnation)
    )

  def check(self, now: float) -> Sequence[quorum.Event]:
    """Does what the time allows; returns what follows.

    A round is announced again that was early, or has waited for the state. One that is
    held up by a newcomer's snapshot goes on, at last.
    """
    current = self.current
    if current is None:
      return []
    step, late = current.id.step, now >= self.deadline
    if late and not current.id.early:
      return self._witness_lost(current, current.message.parts[0].replica)
    if late or (not current.is_announced and self._members.have(step)):
      self._announce(step, current.number, current.message.parts, now)
    return []

  @property
  def deadline(self) -> float:
    """When `check` may find something."""
    current = self.current
    if current is None or not current.is_announced:
      return math.inf
    if current.id.early:
      return current.began + self._limits.round
    witness = current.message.witness
    state = None if witness is None else self._members.get(witness)
    if state is None or not state.needs:
      return math.inf
    # Long before the run ends, of which the newcomer is no part yet.
    return current.began + self._limits.timeout / 2

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

  def lost(self, member: Member) -> Sequence[quorum.Event]:
    """Stops waiting for a member that was removed.

    If it was the last one with the state, the round has failed because of it: the
    gradients of the others stay, and their round waits for the state.
    """
    current = self.current
    if current is None:
      return []
    incarnation = member.incarnation
    if incarnation == current.message.witness and current.awaits(incarnation):
      return self._witness_lost(current, member.replica)
    if current.is_announced and not self._members.have(current.id.step):
      return current.failure(member.replica)
    return []

  def end(self, cancel: bool) -> Round | None:
    """Ends the current round, and returns it.

    Args:
      cancel: whether its members are told: it is not committed.
    """
    current, self.current = self.current, None
    if not cancel:
      self._strikes.clear()
    elif current is not None and current.is_announced:
      self._cancel(current)
    return current


def sorted_by_replica(members: Members) -> list[MemberState]:
  """The members, in the order of their replicas."""
  by_replica = {state.member.replica: state for state in members}
  return [by_replica[replica] for replica in ordered(by_replica)]
