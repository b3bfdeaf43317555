"""Rounds for a step's mean: which members take part, and which have yet to report.

    announced early, before gradients --all have begun it--> begun
    announced, once the rules have chosen gradients -------> begun
      |
      v  all members and the witness have the mean
    quorum.Done

The methods of `Round` and `Rounds` return events for the quorum's rules. A round ends
when the rules commit the step or abandon the round.
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

# After so many failed rounds between the same two members, one of them is reported.
_STRIKES = 3
# A replica that is more steps behind gets a snapshot instead of means; a replica that
# has just got a snapshot is given more time to catch up.
_MAX_LAG = 8
_MAX_LAG_AFTER_SNAPSHOT = 32
# A replica that trains alone sends each mean to a newcomer. While the newcomer fetches
# its snapshot, only so many steps are taken without waiting until the newcomer has the
# mean: otherwise the replica could take steps faster than it sends means.
_ALONE = 4


class Round:
  """The aggregation of a step, by one announcement of it.

  Attributes:
    message: the announcement to its members and readers.
    number: the rules' number of the round; 0 until they have chosen its gradients.
    began: when the rules chose its gradients.
    is_announced: whether members know of it; it waits while no member has the state.
    holders: the members that have reported that they have the mean.
    has_failed: whether an early round failed for a member before it began.
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
    """Begins an early round: the rules have chosen its gradients."""
    self.message = msg.Round(self.id, parts, self.message.peers)
    self.number, self.began = number, now

  def completed(self) -> list[quorum.Done]:
    """The event for the rules, once all that must have the mean have it."""
    if not self.number or not self._awaited <= self.holders:
      return []
    return [quorum.Done(self.id.step, self.number)]

  def awaits(self, incarnation: Incarnation) -> bool:
    """Whether a member must have the mean, and has not reported that it has."""
    return incarnation in self._awaited - self.holders

  def go_without(self, witness: Incarnation) -> list[quorum.Done]:
    """The witness need not have the mean any more."""
    self._awaited.discard(witness)
    return self.completed()

  def failure(self, failed: ReplicaId) -> list[quorum.Failed]:
    """The round can't be completed, because of this replica."""
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
    # How many rounds were announced for each step, so that no id is used twice.
    self._numbers: collections.Counter[int] = collections.Counter()
    # A round that was announced before its gradients were submitted.
    self._early: Round | None = None
    # How often rounds have failed between two members, at this step.
    self._strikes: collections.Counter[frozenset[Incarnation]] = (
      collections.Counter()
    )

  def announce_early(self, step: int) -> None:
    """Announces that the next step is the mean of one gradient of each member.

    So a member begins to aggregate as soon as it has its gradient, and a step takes
    one round trip less.
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
    """Cancels the early round: a member is gone, or a gradient won't come."""
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
    """Begins a round; returns the events that follow from earlier reports.

    Args:
      step: the step.
      number: the rules' number of the round.
      parts: its gradients.
      early: for each gradient, the early round for which it was submitted.
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
    # With a single owner, the only copy of a committed mean could be lost with its
    # process. And if no owner has the state that the mean is applied to, a reader with
    # this state must have the mean before the commit.
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
    # Without a member that has the state of this step, the step could be committed,
    # and no replica could apply its mean. So the announcement waits (see `check`).
    is_announced = self._members.have(step)
    self.current = Round(message, number, now, is_announced)
    if is_announced:
      self._out.notify_all([*owners, *readers], message)

  def _readers(
    self, step: int, owners: set[int]
  ) -> tuple[list[MemberState], int]:
    """The other members that get the mean, and how many steps the last is behind."""
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
    """A member or witness reports how a round has ended for it."""
    current, early = self.current, self._early
    incarnation, replica = state.member.incarnation, state.member.replica
    if early is not None and message.round == early.id:
      # Reports may arrive before the last member's gradient does.
      early.has_failed |= isinstance(message, msg.Failed)
      early.holders.add(incarnation)
    if current is None or message.round != current.id:
      return []
    if isinstance(message, msg.Done):
      current.holders.add(incarnation)
      return current.completed()
    parts = current.message.parts
    if current.id.early:
      # Other members may not have had a gradient yet, so no replica has failed.
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
    """The witness won't have the mean; goes on without it, if another member can."""
    witness = current.message.witness
    assert witness is not None
    states = [self._members.get(p.incarnation) for p in current.message.parts]
    step = current.id.step
    if not any(s is not None and s.has(step) for s in states):
      # Only the witness had the state that the mean is applied to.
      return current.failure(failed)
    return current.go_without(witness)

  @property
  def awaited(self) -> tuple[ReplicaId, ...]:
    """The members that must have the mean, and have not reported that they have."""
    if self.current is None:
      return ()
    message, awaits = self.current.message, self.current.awaits
    all_ = (*message.peers, *message.readers)
    return tuple(
      member.replica for member in all_ if awaits(member.incarnation)
    )

  def check(self, now: float) -> Sequence[quorum.Event]:
    """Does what is due; returns the events that follow.

    An early round that takes too long is announced again, and a round that waits for
    the state is announced once a member has it. A round whose witness waits for its
    snapshot goes on without the witness in the end.
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
    # Long before `timeout` would end the run: steps don't depend on a newcomer.
    return current.began + self._limits.timeout / 2

  def strike(
    self, state: MemberState, message: msg.Failed
  ) -> MemberState | None:
    """Counts a failed round between two members that are both still connected.

    Returns:
      The member that was reported as failed, once there are too many failures; at most
      once in a step.
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

    If it was the last member with the state, the round has failed because of it: the
    other gradients stay accepted, and their next round waits for the state.
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
      cancel: whether its members are notified, since it is not committed.
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
