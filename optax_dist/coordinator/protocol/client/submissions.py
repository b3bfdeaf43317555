"""One replica's submissions, from the training loop to their outcome.

`Submissions` tracks submissions without an outcome (several, if a step needs more
gradients than there are replicas), and submissions in commits that the replica has yet
to apply. Every submission is resolved once.
"""

from __future__ import annotations

from optax_dist import quorum
from optax_dist.coordinator.protocol.effects import Effect, Resolved, Taken
from optax_dist.coordinator.protocol.entries import Committed, Incarnation
from optax_dist.coordinator.protocol.messages import SubmitGradient


class Submissions:
  """Submissions and their outcomes.

  Attributes:
    unresolved: submissions that were not dropped, and are in no commit that the replica
      knows of, in order.
  """

  def __init__(self) -> None:
    self.unresolved: dict[int, SubmitGradient] = {}
    # The submission that the training loop waits for; -1 for none.
    self._pending = -1
    # Outcomes of submissions in commits, each with the step that is yet to be applied.
    self._counted: list[tuple[int, Resolved]] = []

  @property
  def waits(self) -> bool:
    """Whether the training loop waits for an outcome."""
    return self._pending >= 0 or bool(self._counted)

  def submit(self, submitted: SubmitGradient) -> None:
    """Takes a submission."""
    self.unresolved[submitted.sequence] = submitted
    self._pending = submitted.sequence

  def _forget(self, sequence: int) -> bool:
    """Removes a submission; returns whether it had no outcome."""
    if self._pending == sequence:
      self._pending = -1
    return self.unresolved.pop(sequence, None) is not None

  def asked_for_more(self, sequence: int) -> list[Effect]:
    """Handles a request for more gradients after an accepted submission."""
    if sequence < 0 or sequence != self._pending:
      return []
    self._pending = -1
    return [Taken(sequence)]

  def dropped(self, sequence: int, reason: str) -> list[Effect]:
    """Handles that a submission was dropped."""
    return [Resolved(sequence, reason, 0)] if self._forget(sequence) else []

  def committed(self, commit: Committed, incarnation: Incarnation) -> None:
    """Handles a commit, which may contain submissions of this membership."""
    step = commit.round.step + 1
    members = tuple(dict.fromkeys([part.replica for part in commit.parts]))
    for part in commit.parts:
      # A submission may have been resolved as lost before (see `lost`).
      if part.incarnation == incarnation and self._forget(part.sequence):
        outcome = Resolved(part.sequence, "", step, members, part.staleness)
        self._counted.append((step, outcome))

  def published(self, step: int) -> list[Effect]:
    """Resolves the submissions that count as of this step."""
    resolved: list[Effect] = []
    while self._counted and self._counted[0][0] <= step:
      resolved.append(self._counted.pop(0)[1])
    return resolved

  def revoked(self, step: int) -> list[Effect]:
    """Resolves submissions in void commits: the run now is only at this step."""
    void = [outcome for at, outcome in self._counted if at > step]
    self._counted = [entry for entry in self._counted if entry[0] <= step]
    return [Resolved(o.sequence, quorum.Reason.LOST.value, 0) for o in void]

  def lost(self, reason: str, counted: bool = False) -> list[Effect]:
    """Resolves submissions that are in no commit that the replica knows of.

    Args:
      reason: the reason.
      counted: whether to resolve also those in known commits, as these won't be
        applied.
    """
    resolved: list[Effect] = [
      Resolved(sequence, reason, 0) for sequence in self.unresolved
    ]
    self.unresolved.clear()
    self._pending = -1
    if counted:
      resolved += [outcome for _, outcome in self._counted]
      self._counted = []
    return resolved
