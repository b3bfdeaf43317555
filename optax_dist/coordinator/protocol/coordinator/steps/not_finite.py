"""Says which members deliver gradients that are not finite, again and again."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.members import MemberState
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox

# A member is named after so many gradients in a row that are not finite, and again
# whenever their number has grown by this factor, since it may grow as long as the run.
_FIRST, _AGAIN = 3, 10


def name(state: MemberState, step: int, is_blocked: bool, out: Outbox) -> None:
  """Names a member with many such gradients, or that gets no samples because of them.

  Args:
    state: the member, whose last gradient was not finite.
    step: the step that is taken.
    is_blocked: whether the member gets no more samples that others can take.
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
