"""What follows from an audit that has found gradients to differ."""

from __future__ import annotations

from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.members import Members
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps.consequences import (
  Consequence,
  Evict,
  Fail,
)
from optax_dist.coordinator.protocol.policies.audit import Verdict


def judge(
  verdict: Verdict, step: int, members: Members, out: Outbox
) -> list[Consequence]:
  """Evicts members whose gradients are wrong, or ends the run.

  Args:
    verdict: what was found.
    step: of which step.
    members: the members.
    out: where the journal's line goes.
  """
  states = {i: members[i] for i in verdict.digests}
  names = [state.member.replica for state in states.values()]
  wrong = [states[i].member.replica for i in verdict.wrong]
  digests = {
    str(states[i].member.replica): d for i, d in verdict.digests.items()
  }
  out.note(journal_events.Audit(step, verdict.slot, digests, wrong))
  what = f"gradient of micro-batch {verdict.slot} of step {step}"
  others = [name for name in names if name not in wrong]
  why = f"its {what} is not what replicas {others} have computed"
  evictions: list[Consequence] = [
    Evict(i, why, wrong=True) for i in verdict.wrong
  ]
  return evictions or [
    Fail(
      f"Replicas {names} have computed different values of the {what}, and no"
      " other replica is left to decide which is wrong. Resume from the last"
      " checkpoint with three replicas, which can."
    )
  ]
