"""The quorum's rules: the replicas that they know, and their decisions, carried out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from optax_dist import quorum
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.steps.gradients import Arrival
from optax_dist.coordinator.protocol.entries import Member, ReplicaId
from optax_dist.coordinator.protocol.history import History

#: Carries out decisions of the rules, for a gradient that has just arrived, if any.
Follow: TypeAlias = Callable[[Sequence[quorum.Decision], Arrival | None], None]


class Ruling:
  """The rules.

  Attributes:
    state: their state.
    expected_until: until when the replicas of a run that has begun again are expected
      to join again; infinity if none are.
  """

  def __init__(
    self, config: Config, history: History, members: Members, follow: Follow
  ):
    """Starts before any replica has joined.

    Args:
      config: the run's.
      history: knows which replicas there were.
      members: the members.
      follow: called with the decisions on each event.
    """
    # Members may still submit gradients that are this stale.
    late = config.rules.max_staleness
    self.state = config.quorum_state(history.step - late)
    self._lower_on_loss = config.rules.lower_on_loss
    self._history, self._members, self._follow = history, members, follow
    self.expected_until = math.inf

  def begin(self, until: float, new: Collection[MemberState]) -> None:
    """Informs the rules of all replicas in the log.

    Args:
      until: until when lost replicas are expected back, if the run has begun again.
      new: members that don't count yet, so that steps don't wait for them.
    """
    history = self._history
    is_new = history.has_no_commits and history.beginnings > 1
    self.expected_until = until if is_new else math.inf
    known: list[quorum.Event] = []
    for replica, departed in history.departed.items():
      if departed.left or not is_new:
        departure = quorum.Leave if departed.left else self._departure()
        known += [quorum.Join(replica), departure(replica)]
    for state in self._members:
      member = state.member
      if state not in new:
        known.append(quorum.Join(member.replica, member.incarnation))
    known += [quorum.Leave(state.member.replica) for state in new]
    for event in known:
      self.state, _ = quorum.step(self.state, event)
    self.state = dataclasses.replace(self.state, step=history.step)

  @property
  def step(self) -> int:
    """The step that is taken next."""
    return self.state.step

  def apply(
    self, *events: quorum.Event, arriving: Arrival | None = None
  ) -> None:
    """Applies events, and carries out the decisions, unless the run has ended.

    Args:
      *events: the events.
      arriving: the gradient that the events are about, if it has just arrived.
    """
    for event in () if self._history.ended else events:
      self.state, decisions = quorum.step(self.state, event)
      self._follow(decisions, arriving)

  # Replicas.

  def can_go_without(self, member: Member) -> bool:
    """Whether a new member can stay a newcomer, for which steps don't wait.

    That is so where departures lower the number of gradients that a step needs: if the
    member counted, a step would wait for it now, or once another member is gone. Where
    each replica has a share of a step, only a member that was lost and has joined again
    can stay a newcomer.
    """
    state = self.state
    is_short = state.live < state.replicas_needed
    if state.exact or not state.config.lower_on_leave or is_short:
      return False
    if state.shared:
      return member.replica in state.replicas
    after, _ = quorum.step(
      state, quorum.Join(member.replica, member.incarnation)
    )
    there = lambda counts: counts.live + counts.awaited + counts.lost
    return there(after) > there(state)

  def join(self, member: Member, since: int) -> None:
    """A member counts from now on.

    Args:
      member: the member.
      since: the first step that its gradients may be on.
    """
    self.apply(quorum.Join(member.replica, member.incarnation))
    known = self.state.replicas.get(member.replica)
    if known is not None and known.start > since:
      known = known._replace(start=since)
      replicas = self.state.replicas | {member.replica: known}
      self.state = dataclasses.replace(self.state, replicas=replicas)

  def is_short_without(self, member: Member, left: bool) -> bool:
    """Whether too few replicas would count for a step, once a member is gone.

    Args:
      member: the member.
      left: whether it has left; otherwise it is lost.
    """
    departure = self._departure(left)(member.replica, member.incarnation)
    after, _ = quorum.step(self.state, departure)
    return after.live < after.replicas_needed

  def removed(self, member: Member, left: bool) -> None:
    """Informs the rules that a replica is no longer a member."""
    self.apply(self._departure(left)(member.replica, member.incarnation))

  def forget_departed(self) -> None:
    """Lowers the quorum for departed replicas, now that another one has joined.

    When the last replica departed, the quorum stayed as it was, since it would have
    been lowered to zero (`_departure`).
    """
    departed = self._history.departed
    for replica, known in self.state.replicas.items():
      if not (known.live or known.left) and (
        self._lower_on_loss or (replica in departed and departed[replica].left)
      ):
        self.apply(quorum.Leave(replica))

  def never_joined(self, replicas: Iterable[ReplicaId]) -> bool:
    """Counts replicas as lost that have died before they joined.

    Returns:
      Whether there was such a replica.
    """
    # The log knows all replicas that have joined, and whether they are lost.
    unknown = [r for r in replicas if r not in self.state.replicas]
    for replica in unknown:
      self.apply(self._departure()(replica))
    return bool(unknown)

  def stop_expecting(self) -> None:
    """Counts replicas as lost that did not join again after the run began again."""
    self.expected_until = math.inf
    self.never_joined(
      departed.member.replica for departed in self._history.lost()
    )

  @property
  def never_came(self) -> int:
    """How many replicas have never joined, and are known not to come."""
    known = self.state.replicas.values()
    return sum(r.incarnation < 0 and not r.live for r in known)

  @property
  def can_be_enough(self) -> bool:
    """Whether the replicas that are there, or are to come, suffice for a step."""
    state = self.state
    # Without members, lost replicas still count; they lower the quorum once a replica
    # joins (`forget_departed`).
    lowered = self._lower_on_loss and not state.live
    least = 1 if lowered else state.replicas_needed
    return state.live + state.awaited >= least

  def _departure(
    self, left: bool = False
  ) -> type[quorum.Leave] | type[quorum.Lost]:
    """How the departure of a replica counts."""
    if not self._members and (not left or self._history.lost()):
      # While a lost replica may come back, the quorum is not lowered to zero: the run
      # would end as if it were complete.
      return quorum.Lost
    return quorum.Leave if left or self._lower_on_loss else quorum.Lost
