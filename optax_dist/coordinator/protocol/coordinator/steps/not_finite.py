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

# Gradients in a row that are not finite, after which that is said; and how many times
# as many there are when it is said again, since it may go on for as long as the run.
_FIRST, _AGAIN = 3, 10


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
    # Members with such gradients, and how many there were when that was said last.
    self._said: dict[Incarnation, int] = {}

  def delivered(self, state: MemberState, count: int) -> None:
    """A member has delivered gradients that are not finite."""
    state.not_finite += count
    self._said.setdefault(state.member.incarnation, 0)

  def check(self, step: int) -> None:
    """Names members with many of them, or that get no more samples for them."""
    for incarnation, said in list(self._said.items()):
      state = self._members.get(incarnation)
      if state is None or not state.not_finite:
        del self._said[incarnation]
      elif state.not_finite >= max(_FIRST, _AGAIN * said) or (
        not said and self._policy.is_blocked(incarnation)
      ):
        self._said[incarnation] = state.not_finite
        self._name(state, step)

  def _name(self, state: MemberState, step: int) -> None:
    member, times = state.member, state.not_finite
    self._out.note(
      journal_events.NotFinite(member.replica, step, times, member.incarnation)
    )
    text = (
      f"replica {member.replica}: {times} gradients in a row are not finite"
    )
    if self._policy.is_blocked(member.incarnation):
      text += "; it gets no more samples that others can take"
    self._out.add(fx.Log(text))
