"""Says which members deliver gradients that are not finite, again and again."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.members import MemberState
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox

# Gradients in a row that are not finite, after which that is said; and how many times
# as many there are when it is said again, since it may go on for as long as the run.
_FIRST, _AGAIN = 3, 10


def name(state: MemberState, step: int, is_blocked: bool, out: Outbox) -> None:
  """Names a member with many of them, or that gets no more samples for them.

  Args:
    state: the member, which has delivered some.
    step: the step that is taken.
    is_blocked: whether it gets no more samples that others can take.
    out: where notes and warnings go.
  """
  member, times, before = state.member, state.not_finite, state.named_at
  if times < max(_FIRST, _AGAIN * before) and (before or not is_blocked):
    return
  state.named_at = times
  out.note(
    journal_events.NotFinite(member.replica, step, times, member.incarnation)
  )
  text = f"replica {member.replica}: {times} gradients in a row are not finite"
  if is_blocked:
    text += "; it gets no more samples that others can take"
  out.add(fx.Log(text))
