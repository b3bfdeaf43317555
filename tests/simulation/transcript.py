"""A simulated run as text, one line for each event that matters."""

from __future__ import annotations

from typing import Any

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import (
  Began,
  Committed,
  Ended,
  Entry,
  Epoch,
  Joined,
  Removed,
)


def line(checker: Any, entry: Entry) -> str:
  """An entry of the log."""
  match entry:
    case Epoch(number):
      return f"epoch {number} begins"
    case Began(start):
      return f"the run begins from step {start.step}"
    case Joined(member):
      return f"{member.process} joins as member {member.incarnation}"
    case Removed(incarnation, left, reason):
      name = checker.members.get(incarnation, "nobody")
      return f"{name} leaves" if left else f"{name} is removed: {reason}"
    case Committed():
      parts = ", ".join(
        f"gradient {part.sequence} of {checker.processes[part.incarnation]}"
        for part in entry.parts
      )
      save = ", to be saved" if entry.save else ""
      return f"step {entry.round.step} is committed, with {parts}{save}"
    case Ended(step, reason, error):
      how = f"fails ({error})" if error else "ends"
      return f"the run {how} at step {step}: {reason}"


def submission(process: Any, submitted: msg.SubmitGradient) -> str:
  """What a training loop has submitted."""
  total = submitted.count
  what = f"gradient {submitted.sequence}"
  what += f", a sum of {total}" if total > 1 else ""
  what += "" if submitted.finite else ", not finite"
  return f"{process.name} submits {what}, on step {submitted.local_step}"
