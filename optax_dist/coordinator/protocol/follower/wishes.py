"""What a replica wants of its leader; each new leader is told again."""

from __future__ import annotations

import dataclasses
import math

from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.messages import (
  Fingerprint,
  Finish,
  Leave,
  Message,
  Save,
)


@dataclasses.dataclass(slots=True)
class Wishes:
  """Wishes that are not fulfilled yet.

  Attributes:
    leaving: whether it wants to leave.
    leave_by: when it leaves without an answer.
    finishing: why it wants the run to end; None if it doesn't.
    saving: whether all shall save.
    fingerprint: the last one, for a leader that others may tell theirs of the
      same step.
  """

  leaving: bool = False
  leave_by: float = math.inf
  finishing: str | None = None
  saving: bool = False
  fingerprint: Fingerprint | None = None

  def leave(self, limits: Deadlines, now: float) -> Message:
    """It wants to leave, or asks another leader: a dead one is replaced."""
    self.leaving = True
    self.leave_by = now + limits.silence + 2 * (limits.pace + limits.patience)
    return Leave(lost=False)

  def finish(self, reason: str) -> Message:
    """It wants the run to end."""
    self.finishing = reason
    return Finish(reason)

  def save(self) -> Message:
    """It wants all to save."""
    self.saving = True
    return Save()

  def compare(self, fingerprint: Fingerprint) -> Message:
    """It wants its state to be compared."""
    self.fingerprint = fingerprint
    return fingerprint

  def again(self, limits: Deadlines, now: float) -> list[Message]:
    """All of them, for another leader."""
    found: list[Message] = []
    if self.leaving:
      found.append(self.leave(limits, now))
    if self.finishing is not None:
      found.append(Finish(self.finishing))
    if self.saving:
      found.append(Save())
    if self.fingerprint is not None:
      found.append(self.fingerprint)
    return found
