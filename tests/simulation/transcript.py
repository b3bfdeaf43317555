"""What happened in a simulated run, one line for each thing that matters."""

from __future__ import annotations

from typing import Any

from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Entry,
  Joined,
  Removed,
  Term,
)


def line(checker: Any, writer: Any, entry: Entry) -> str:
  """An entry of the log, which this process has put there."""
  match entry:
    case Term(term, leader, fresh=fresh):
      how = "begins the run and leads it" if fresh else "leads"
      return f"{leader} {how} (term {term})"
    case Joined(member):
      number = member.incarnation
      return f"{writer.name} lets {member.process} join as member {number}"
    case Removed(incarnation, left, reason):
      name = checker.members.get(incarnation, "nobody")
      how = "lets it go" if left else f"removes it: {reason}"
      return f"{name} is a member no more, {writer.name} {how}"
    case Committed():
      parts = ", ".join(
        f"gradient {part.sequence} of {checker.processes[part.incarnation]}"
        for part in entry.parts
      )
      save = ", to be saved" if entry.save else ""
      return f"step {entry.attempt.step} is committed, with {parts}{save}"
    case Ended(step, reason, error):
      how = f"fails ({error})" if error else "ends"
      return f"the run {how} at step {step}: {reason}"


def submission(process: Any, submitted: ins.Submitted) -> str:
  """What a training loop has submitted."""
  total = submitted.total
  what = f"gradient {submitted.sequence}"
  what += f", a sum of {total}" if total > 1 else ""
  what += "" if submitted.finite else ", not finite"
  return f"{process.name} submits {what}, on step {submitted.local_step}"
