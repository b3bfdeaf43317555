"""One replica's submissions, from the training loop to their outcome.

In one place: what is pending, what was taken in while more is asked for (a
partial sum, with more gradients to aggregate than replicas), and what stands in
a commit that the replica has yet to apply. Every submission is resolved once.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol.effects import Effect, Resolved, Taken
from optax_dist.coordinator.protocol.entries import Committed, Incarnation
from optax_dist.coordinator.protocol.inputs import Submitted


@dataclasses.dataclass(frozen=True, slots=True)
class _Counted:
  """A submission that is part of a commit, not shown to the loop yet."""

  step: int
  outcome: Resolved


class Session:
  """Submissions and their outcomes.

  Attributes:
    pending: the submission that has no answer yet, or None.
    taken: the one that is in, while the next is to contain it; or None.
  """

  def __init__(self) -> None:
    self.pending: Submitted | None = None
    self.taken: Submitted | None = None
    # Whether the loop waits for the outcome of `taken`, and adds nothing to it.
    self._apart = False
    self._counted: list[_Counted] = []

  @property
  def waits(self) -> bool:
    """Whether the training loop waits for an outcome."""
    apart = self._apart and self.taken is not None
    return self.pending is not None or bool(self._counted) or apart

  def submit(self, submitted: Submitted) -> list[Effect]:
    """Takes a submission; it is pending unless an effect resolves it."""
    if submitted.extends >= 0 and (
      self.taken is None or self.taken.sequence != submitted.extends
    ):
      # It has the sum of what was decided by itself.
      return [Resolved(submitted.sequence, "superseded", 0, apart=True)]
    self.pending, self._apart = submitted, False
    return []

  def count(self) -> int:
    """How many gradients of the pending submission the leader hasn't got."""
    assert self.pending is not None
    if self.taken is None or self.pending.extends != self.taken.sequence:
      return self.pending.total
    return self.pending.total - self.taken.total

  def find(self, sequence: int) -> Submitted | None:
    """The submission of this number, where its gradient is still to be had."""
    for submitted in (self.pending, self.taken):
      if submitted is not None and submitted.sequence == sequence:
        return submitted
    return None

  def asked_for_more(self, sequence: int, count: int) -> list[Effect]:
    """The pending submission is in, and is not enough."""
    if self.pending is None or self.pending.sequence != sequence:
      return []
    self.taken, self.pending = self.pending, None
    return [Taken(sequence, count)]

  def dropped(
    self, sequence: int, reason: str, whole: bool = True
  ) -> list[Effect]:
    """A submission doesn't count, or only what it was to add."""
    if self.pending is not None and self.pending.sequence == sequence:
      self._apart = not whole
      self.pending = None
      if whole:
        self.taken = None
    elif self.taken is not None and self.taken.sequence == sequence:
      self.taken = None
    else:
      return []
    return [Resolved(sequence, reason, 0, apart=not whole)]

  def committed(self, commit: Committed, incarnation: Incarnation) -> bool:
    """Stands in the log; whether a submission of this replica is in it."""
    for part in commit.parts:
      if part.incarnation != incarnation:
        continue
      if self.find(part.sequence) is None:
        return True  # It was given up; see `lost`.
      if self.pending is not None and self.pending.sequence == part.sequence:
        self.pending = None
      # If what was taken in is part of it, so it is of what was pending.
      self.taken = None
      step = commit.attempt.step + 1
      members = tuple(p.replica for p in commit.parts)
      outcome = Resolved(part.sequence, "", step, members, part.staleness)
      self._counted.append(_Counted(step, outcome))
      return True
    return False

  def published(self, step: int) -> list[Effect]:
    """The replica's state has this many steps: what counted is resolved."""
    told: list[Resolved] = []
    while self._counted and self._counted[0].step <= step:
      told.append(self._counted.pop(0).outcome)
    return list(told)

  def new_leader(self) -> list[Effect]:
    """The old leader had what was taken in; the new one can't wait for it."""
    taken, self.taken = self.taken, None
    if taken is None or self.pending is not None:
      return []
    return [Resolved(taken.sequence, "lost", 0)]

  def lost(self, reason: str, counted: bool = False) -> list[Effect]:
    """Resolves what is not in a commit that was read.

    Args:
      reason: why.
      counted: whether also what is in commits that won't be applied.
    """
    told: list[Effect] = []
    last = self.pending or self.taken
    if last is not None:
      apart = any(c.outcome.sequence == last.extends for c in self._counted)
      told.append(Resolved(last.sequence, reason, 0, apart=apart))
    self.pending = self.taken = None
    if counted:
      told += [one.outcome for one in self._counted]
      self._counted = []
    return told
