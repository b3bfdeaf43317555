"""Says which members deliver gradients that are not finite, again and again."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.coordinator.protocol.policies.policy import Policy

# Gradients in a row that are not finite, after which that is said: rarely, since it
# may go on for as long as the run does.
_SAID = tuple(3 * 10**n for n in range(9))


class NotFinite:
  """Counts them for each member, in a row."""

  def __init__(self, members: Members, policy: Policy, out: Outbox):
    """Starts without any.

    Args:
      members: the members.
      policy: says who gets no more samples.
      out: where notes and warnings go.
    """
    self._members, self._policy, self._out = members, policy, out
    # Members of which nothing was said yet.
    self._unnamed: set[Incarnation] = set()

  def delivered(self, state: MemberState, count: int, step: int) -> None:
    """A member has delivered gradients that are not finite."""
    before, state.not_finite = state.not_finite, state.not_finite + count
    if any(before < said <= state.not_finite for said in _SAID):
      self._name(state, step)
    elif not before:
      self._unnamed.add(state.member.incarnation)

  def name_blocked(self, step: int) -> None:
    """Names members that get no more samples, if that was not said yet."""
    for incarnation in sorted(self._unnamed):
      state = self._members.get(incarnation)
      if state is None or not state.not_finite:
        self._unnamed.discard(incarnation)
      elif self._policy.is_blocked(incarnation):
        self._name(state, step)

  def _name(self, state: MemberState, step: int) -> None:
    member, times = state.member, state.not_finite
    self._unnamed.discard(member.incarnation)
    self._out.note(
      journal_events.NotFinite(member.replica, step, times, member.incarnation)
    )
    text = (
      f"replica {member.replica}: {times} gradients in a row are not finite"
    )
    if self._policy.is_blocked(member.incarnation):
      text += "; it gets no more samples that others can take"
    self._out.add(fx.Log("warning", text))
