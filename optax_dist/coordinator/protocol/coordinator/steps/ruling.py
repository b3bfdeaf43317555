"""The quorum's rules at work: whom they know, and who follows what they decide."""

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

#: Does what the rules have decided, about a gradient that has come if any.
Follow: TypeAlias = Callable[[Sequence[quorum.Decision], Arrival | None], None]


class Ruling:
  """The rules.

  Attributes:
    state: their state.
    expected_until: until when replicas from before the run began again are expected
      back; infinity if none are.
  """

  def __init__(
    self, config: Config, history: History, members: Members, follow: Follow
  ):
    """Starts before any replica has joined.

    Args:
      config: the run's.
      history: says which replicas there were.
      members: the members.
      follow: called with what follows from an event.
    """
    # Pending gradients of members may be this stale.
    late = config.rules.max_staleness
    self.state = config.quorum_state(history.step - late)
    self._lower_on_loss = config.rules.lower_on_loss
    self._history, self._members, self._follow = history, members, follow
    self.expected_until = math.inf

  def begin(self, until: float, new: Collection[MemberState]) -> None:
    """Tells the rules of all replicas that the log knows.

    Args:
      until: until when lost ones are expected back, after a new beginning.
      new: members for which steps don't wait, as if they had yet to join.
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
    """Applies events, and has what they decide done, unless the run has ended.

    Args:
      *events: the events.
      arriving: the gradient that they are about, if it has just come.
    """
    for event in () if self._history.ended else events:
      self.state, decisions = quorum.step(self.state, event)
      self._follow(decisions, arriving)

  # Replicas.

  def can_go_without(self, member: Member) -> bool:
    """Whether steps need no gradient of a new member unless it counts.

    That is so where a step needs fewer gradients once replicas are gone: if it
    counted, the step would wait for it now, or as soon as another one is gone. And
    where each replica has a share of a step, if it had one before it was lost.
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
    """Whether steps need more replicas than count, once a member is gone.

    Args:
      member: the member.
      left: whether it leaves.
    """
    departure = self._departure(left)(member.replica, member.incarnation)
    after, _ = quorum.step(self.state, departure)
    return after.live < after.replicas_needed

  def removed(self, member: Member, left: bool) -> None:
    """A member is one no more; the others follow."""
    self.apply(self._departure(left)(member.replica, member.incarnation))

  def forget_departed(self) -> None:
    """Who has gone does not count, now that others are there.

    The last one to go has not lowered the quorum, to nobody.
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
      Whether any is.
    """
    # Of any other the log says what it is.
    unknown = [r for r in replicas if r not in self.state.replicas]
    for replica in unknown:
      self.apply(self._departure()(replica))
    return bool(unknown)

  def stop_expecting(self) -> None:
    """Counts replicas as lost that did not come to a new beginning."""
    self.expected_until = math.inf
    self.never_joined(
      departed.member.replica for departed in self._history.lost()
    )

  @property
  def never_came(self) -> int:
    """How many replicas are known not to come, of those that never joined."""
    known = self.state.replicas.values()
    return sum(r.incarnation < 0 and not r.live for r in known)

  @property
  def can_be_enough(self) -> bool:
    """Whether the replicas that are there, or are to come, suffice for a step."""
    state = self.state
    # Those that are lost don't count any more once another one is there.
    lowered = self._lower_on_loss and not state.live
    least = 1 if lowered else state.replicas_needed
    return state.live + state.awaited >= least

  def _departure(
    self, left: bool = False
  ) -> type[quorum.Leave] | type[quorum.Lost]:
    """How the departure of a replica counts."""
    if not self._members and (not left or self._history.lost()):
      # The quorum is not lowered to nobody while a lost replica may come back:
      # the run would end well.
      return quorum.Lost
    return quorum.Leave if left or self._lower_on_loss else quorum.Lost
