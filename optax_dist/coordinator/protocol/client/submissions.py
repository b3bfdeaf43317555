"""One replica's submissions, from the training loop to their outcome.

It tracks the pending submission, the one that is buffered while more gradients
are requested (a partial sum, with more gradients to aggregate than replicas),
and those in commits that the replica has yet to apply. Every submission is
resolved once.
"""

from __future__ import annotations

from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.effects import Effect, Resolved, Taken
from optax_dist.coordinator.protocol.entries import Committed, Incarnation
from optax_dist.coordinator.protocol.messages import SubmitGradient


class Submissions:
  """Submissions and their outcomes.

  Attributes:
    pending: the submission without an answer, or None.
    taken: the buffered submission that the next one should extend, or None.
  """

  def __init__(self) -> None:
    self.pending: SubmitGradient | None = None
    self.taken: SubmitGradient | None = None
    # Outcomes of those in commits, each with the step that is yet to be applied.
    self._counted: list[tuple[int, Resolved]] = []

  @property
  def waits(self) -> bool:
    """Whether the training loop waits for an outcome."""
    return self.pending is not None or bool(self._counted)

  def submit(self, submitted: SubmitGradient) -> list[Effect]:
    """Takes a submission; it is pending unless an effect resolves it."""
    if submitted.count < submitted.total and self.taken is None:
      return self._supersede(submitted)
    self.pending = submitted
    return []

  def _supersede(self, larger: SubmitGradient) -> list[Effect]:
    """Drops a sum that includes one which was decided, after the outcome of that."""
    outcome = Resolved(larger.sequence, "superseded", 0)
    if not self._counted:
      return [outcome]
    self._counted.append((self._counted[-1][0], outcome))
    return []

  def find(self, sequence: int) -> SubmitGradient | None:
    """The submission with this number, if its gradient is still available."""
    for submitted in (self.pending, self.taken):
      if submitted is not None and submitted.sequence == sequence:
        return submitted
    return None

  def asked_for_more(self, sequence: int) -> list[Effect]:
    """Handles that the pending submission was buffered, and is not enough."""
    if self.pending is None or self.pending.sequence != sequence:
      return []
    self.taken, self.pending = self.pending, None
    return [Taken(sequence)]

  def dropped(self, sequence: int, reason: str, whole: bool) -> list[Effect]:
    """Handles that a submission, or only its addition, was dropped."""
    pending, taken = self.pending, self.taken
    if pending is not None and pending.sequence == sequence:
      if whole:
        return self.lost(reason)
      self.pending = None
    elif taken is not None and taken.sequence == sequence:
      self.taken = None
    else:
      return []
    return [Resolved(sequence, reason, 0)]

  def committed(self, commit: Committed, incarnation: Incarnation) -> None:
    """Handles a commit, in which there may be a submission of this membership."""
    for part in commit.parts:
      if part.incarnation != incarnation or self.find(part.sequence) is None:
        continue  # Or it was given up; see `lost`.
      last, self.pending, self.taken = self.pending, None, None
      step = commit.round.step + 1
      members = tuple(p.replica for p in commit.parts)
      outcome = Resolved(part.sequence, "", step, members, part.staleness)
      self._counted.append((step, outcome))
      if last is not None and last.sequence != part.sequence:
        # It includes that sum, and a coordinator that has started again can't know it.
        self._supersede(last)
      return

  def published(self, step: int) -> list[Effect]:
    """Resolves the submissions that count as of this step."""
    resolved: list[Effect] = []
    while self._counted and self._counted[0][0] <= step:
      resolved.append(self._counted.pop(0)[1])
    return resolved

  def new_coordinator(self) -> list[Effect]:
    """Only the last coordinator had the buffered submission."""
    if self.pending is None:
      return self.lost("lost")
    self.pending = replace(self.pending, count=self.pending.total)
    return []

  def lost(self, reason: str, counted: bool = False) -> list[Effect]:
    """Resolves submissions that are not in a commit that was read.

    Args:
      reason: the reason.
      counted: whether to include those in commits that won't be applied.
    """
    resolved: list[Effect] = []
    for submitted in (self.taken, self.pending):
      if submitted is not None:
        resolved.append(Resolved(submitted.sequence, reason, 0))
    self.pending = self.taken = None
    if counted:
      resolved += [outcome for _, outcome in self._counted]
      self._counted = []
    return resolved
