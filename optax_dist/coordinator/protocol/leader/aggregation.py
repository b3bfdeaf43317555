"""The attempts at a step, one after the other, and what members report of them."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol.entries import AttemptId, Incarnation
from optax_dist.coordinator.protocol.leader.attempt import Attempt as _Attempt
from optax_dist.coordinator.protocol.leader.outbox import Outbox
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster
from optax_dist.coordinator.protocol.messages import Attempt, Done, Failed

# Attempts at a step that may fail between the same two members.
_STRIKES = 3


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
    self.attempt: _Attempt | None = None
    self._roster, self._out = roster, out
    # Reports that came before the attempt began here: members are faster than
    # another member's gradient.
    self._early: dict[Incarnation, Done | Failed] = {}
    # How often attempts have failed between two members, at this step.
    self._strikes: collections.Counter[frozenset[Incarnation]] = (
      collections.Counter()
    )

  def begin(
    self, message: Attempt, optimistic: AttemptId | None, now: float
  ) -> list[quorum.Event]:
    """Begins an attempt; returns what follows from earlier reports.

    Args:
      message: announces it.
      optimistic: the id under which all members have begun it, if they have.
      now: the time.
    """
    self.attempt = _Attempt(message, optimistic, now)
    if optimistic is None:
      self._announce(self.attempt, now)
    early, self._early = self._early, {}
    events: list[quorum.Event] = []
    for incarnation, report in early.items():
      state = self._roster.get(incarnation)
      if state is not None:
        events += self.reported(state, report, now)
    return events

  def _announce(self, attempt: _Attempt, now: float) -> None:
    states = map(self._roster.get, attempt.announce(now))
    self._out.say_to(filter(None, states), attempt.message)

  def reported(
    self, state: MemberState, message: Done | Failed, now: float
  ) -> Sequence[quorum.Event]:
    """A member or witness says how an attempt has ended for it."""
    attempt, incarnation = self.attempt, state.member.incarnation
    if attempt is None:
      if message.attempt.number == 0:
        self._early[incarnation] = message
    elif isinstance(message, Done):
      return attempt.done(incarnation, message.attempt)
    elif message.attempt != attempt.id:
      pass
    elif attempt.optimistic is not None:
      self._announce(attempt, now)
    else:
      return attempt.failed(state, message)
    return []

  def strike(
    self, state: MemberState, message: Failed
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

  def end(self) -> _Attempt | None:
    """Ends the current attempt, and returns it."""
    attempt, self.attempt = self.attempt, None
    return attempt

  def committed(self) -> None:
    """The step is committed: what was counted or kept for it is void."""
    self._early = {}
    self._strikes.clear()
