"""Attempts at a step's mean: who takes part, and who has yet to report.

    begun by its members themselves --announce--> announced
      |  Done of every member                       |  Done of a member,
      v                                             v  once the witness has the mean
    quorum.Done for all of them                   quorum.Done for it

What an `Attempt` and the `Aggregation` of a step return are events for the
quorum's rules. An attempt ends when these commit the step or abandon it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Incarnation,
  Part,
)
from optax_dist.coordinator.protocol.leader.outbox import Outbox
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster

# Attempts at a step that may fail between the same two members.
_STRIKES = 3
# A replica that is more steps behind gets a snapshot instead of means; one that
# has just got a snapshot is given more time to catch up.
_MAX_LAG = 8
_MAX_LAG_AFTER_SNAPSHOT = 32


class Attempt:
  """The current aggregation.

  Attributes:
    message: announces it to members and readers.
    optimistic: the id under which all members have begun it by themselves; None
      once it is announced, or if they have not begun.
    began: when it began.
    limited: whether its members were told that all have begun it.
  """

  def __init__(
    self, message: msg.Attempt, optimistic: AttemptId | None, now: float
  ):
    self.message, self.optimistic = message, optimistic
    self.began, self.limited = now, False
    # The replica that must also get the mean; None once it has.
    self._witness = message.witness
    # Members that have the mean of the optimistic attempt.
    self._reported: set[Incarnation] = set()
    # Reports that are held back until the witness has the mean.
    self._held: list[quorum.Done] = []

  @property
  def id(self) -> AttemptId:
    """The id under which its members take part."""
    return self.optimistic or self.message.attempt

  def announce(self, now: float) -> tuple[Incarnation, ...]:
    """Announces it; an optimistic one is void. Returns who is told, in order."""
    self.optimistic, self.began = None, now
    parts = self.message.parts
    return (*(part.incarnation for part in parts), *self.message.readers)

  def done(self, incarnation: Incarnation, id_: AttemptId) -> list[quorum.Done]:
    """A member or the witness has the mean; returns what counts now."""
    if id_ != self.id:
      return []
    parts = self.message.parts
    if self.optimistic is not None:
      self._reported.add(incarnation)
      everybody = {part.incarnation for part in parts}
      return [self._report(p) for p in parts if self._reported >= everybody]
    if incarnation == self._witness:
      return self._witnessed()
    own = [self._report(p) for p in parts if p.incarnation == incarnation]
    if self._witness is None:
      return own
    self._held += own
    return []

  def failed(
    self, state: MemberState, message: msg.Failed
  ) -> Sequence[quorum.Event]:
    """A member or the witness of an announced attempt can't complete it."""
    if state.member.incarnation == self._witness:
      return self._witnessed()
    named = [
      part.replica
      for part in self.message.parts
      if part.incarnation == message.failed_replica
    ]
    id_, replica = self.message.attempt, state.member.replica
    failed = named[0] if named else None
    return [quorum.Failed(replica, id_.step, id_.number, failed)]

  def dismiss(self, incarnation: Incarnation) -> list[quorum.Done]:
    """Stops waiting for a member that was removed."""
    return self._witnessed() if incarnation == self._witness else []

  def due(self, limits: Deadlines) -> float:
    """When its members must limit their waits, unless they have from the start.

    A member that begins by itself doesn't know whether the others have a
    gradient yet.
    """
    if self.optimistic is None or self.limited:
      return math.inf
    return self.began + limits.attempt

  def _report(self, part: Part) -> quorum.Done:
    id_ = self.message.attempt
    return quorum.Done(part.replica, id_.step, id_.number)

  def _witnessed(self) -> list[quorum.Done]:
    self._witness = None
    held, self._held = self._held, []
    return held


class Aggregation:
  """Has members aggregate a step, until the quorum's rules commit it.

  Attributes:
    attempt: the current one, or None.
  """

  def __init__(self, roster: Roster, out: Outbox):
    """Starts without an attempt.

    Args:
      roster: the members.
      out: where announcements go.
    """
    self.attempt: Attempt | None = None
    self._roster, self._out = roster, out
    # Reports that came before the attempt began here: members are faster than
    # another member's gradient.
    self._early: dict[Incarnation, msg.Done | msg.Failed] = {}
    # How often attempts have failed between two members, at this step.
    self._strikes: collections.Counter[frozenset[Incarnation]] = (
      collections.Counter()
    )

  def begin(
    self, message: msg.Attempt, optimistic: AttemptId | None, now: float
  ) -> list[quorum.Event]:
    """Begins an attempt; returns what follows from earlier reports.

    Args:
      message: announces it.
      optimistic: the id under which all members have begun it, if they have.
      now: the time.
    """
    self.attempt = Attempt(message, optimistic, now)
    if optimistic is None:
      self._announce(self.attempt, now)
    early, self._early = self._early, {}
    events: list[quorum.Event] = []
    for incarnation, report in early.items():
      state = self._roster.get(incarnation)
      if state is not None:
        events += self.reported(state, report, now)
    return events

  def _announce(self, attempt: Attempt, now: float) -> None:
    states = map(self._roster.get, attempt.announce(now))
    self._out.say_to(filter(None, states), attempt.message)

  def reported(
    self, state: MemberState, message: msg.Done | msg.Failed, now: float
  ) -> Sequence[quorum.Event]:
    """A member or witness says how an attempt has ended for it."""
    attempt, incarnation = self.attempt, state.member.incarnation
    if attempt is None:
      if message.attempt.number == 0:
        self._early[incarnation] = message
    elif isinstance(message, msg.Done):
      return attempt.done(incarnation, message.attempt)
    elif message.attempt != attempt.id:
      pass
    elif attempt.optimistic is not None:
      self._announce(attempt, now)
    else:
      return attempt.failed(state, message)
    return []

  def strike(
    self, state: MemberState, message: msg.Failed
  ) -> tuple[MemberState, MemberState] | None:
    """Counts a failure between two members that are not known to be dead.

    Returns:
      Both, once there were too many: who has reported them first.
    """
    failed = self._roster.get(
      -1 if message.failed_replica is None else message.failed_replica
    )
    if failed is None or failed is state:
      return None
    pair = frozenset((state.member.incarnation, failed.member.incarnation))
    self._strikes[pair] += 1
    if self._strikes[pair] < _STRIKES:
      return None
    del self._strikes[pair]
    return state, failed

  def dismiss(self, incarnation: Incarnation) -> list[quorum.Done]:
    """Stops waiting for a member that was removed."""
    self._early.pop(incarnation, None)
    return [] if self.attempt is None else self.attempt.dismiss(incarnation)

  def end(self) -> Attempt | None:
    """Ends the current attempt, and returns it."""
    attempt, self.attempt = self.attempt, None
    return attempt

  def committed(self) -> None:
    """The step is committed: what was counted or kept for it is void."""
    self._early = {}
    self._strikes.clear()


def announcement(
  id_: AttemptId, parts: tuple[Part, ...], roster: Roster
) -> msg.Attempt:
  """Who else gets the mean of these parts, and who must before it counts."""
  inside = {part.incarnation for part in parts}
  readers, lag = [], 0
  for state in roster:
    incarnation = state.member.incarnation
    behind = id_.step - state.applied
    limit = _MAX_LAG if state.server is None else _MAX_LAG_AFTER_SNAPSHOT
    late = state.applied < 0 or behind > limit
    if incarnation in inside or late or not state.is_connected:
      continue
    if state.needs and state.server is None:
      continue
    readers.append(incarnation)
    lag = max(lag, behind)
  witness = None
  if len(parts) == 1:
    # The only copy of a committed step would be lost with its process.
    able = [i for i in readers if not roster[i].needs]
    key = lambda i: (roster[i].applied, i)
    witness = max(able, key=key, default=None)
  return msg.Attempt(id_, parts, tuple(readers), witness, lag)
