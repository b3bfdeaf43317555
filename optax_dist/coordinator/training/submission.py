"""A replica's sum of gradients, from the first gradient to the outcome.

    training loop                  Submission                       event loop

    draw       -> samples of the next gradient            <-  leases
    add        -> whether the sum `is_complete`           <-  gradients requested
    submit     ->                         SubmitGradient  ->
    waits      -> what it waits for, "" for nothing       <-  answers, admissions
    on_answer  -> the Result in `ended`
    resume     -> the next sum, on the current state      <-  published states

A sum has one gradient, or more if more are requested than there are replicas:

    draw, add, ... --> pending --> applied, or dropped with a reason --> resume
        ^                 |
        +----- taken <----+   the coordinator has it, and requests more gradients

The requested gradients make another sum, on the same state. If that sum is dropped, the
taken sums still count. If the taken sums are decided while another sum is computed, the
latter is superseded. A gradient that is known to be stale is reported without its
numbers. In any case each gradient gets one outcome, which `counts` has.

In a deterministic run a lease may become smaller while its replica computes, because
others have taken its last slots. A gradient of a slot that is not leased any more is
not added.

There is no clock, no thread and no array here: gradients and states are opaque, and the
event loop's notifications are read from the `TrainingInbox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from optax_dist.coordinator.protocol.effects import Resolved, Taken
from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.coordinator.protocol.journal_events import Timings
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.training.draws import Draws
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp
from optax_dist.quorum import Reason

if TYPE_CHECKING:
  from optax_dist.coordinator.runtime.inbox import TrainingInbox

_FINISHED = Reason.FINISHED.value


class Gradient(NamedTuple):
  """A gradient without its numbers.

  Attributes:
    batch: its data for the journal, as JSON text.
    seconds: seconds that computing it took; None if unknown.
    data: its samples, if samples are leased.
  """

  batch: str
  seconds: float | None
  data: Spans


class Result(NamedTuple):
  """The outcome of a sum.

  Attributes:
    reason: why it was dropped, a value of `quorum.Reason`; "" otherwise.
    applied: its outcome, if it is part of a commit.
    behind: whether the coordinator found it stale; a gradient on the same parameters
      would be stale, too.
    forgets: whether it has samples; if it was dropped, other replicas get these.
  """

  reason: str
  applied: Resolved | None
  behind: bool
  forgets: bool


class Submission:
  """The sum of one replica, from its first gradient to its outcome.

  Attributes:
    seen: the notifications of the event loop so far.
    base: the state that gradients are computed on.
    incarnation: the membership that they are computed in; -1 before the first.
    sequence: number of the next submission.
    pending: the submission without an answer yet; -1 if there is none.
    taken: earlier sums on `base` that the coordinator has accepted: the gradients in
      each, by submission.
    total: the sum; None if there is none, or only a stale gradient to report.
    gradients: the gradients in the sum.
    draws: the samples of the next gradient, if samples are leased.
    is_complete: whether the sum is to be submitted.
    ended: the outcome of the last sum, until `resume`.
    counts: the number of gradients by outcome.
  """

  def __init__(
    self,
    seen: TrainingInbox,
    add: Callable[[Any, Any], Any],
    *,
    max_staleness: int | None,
    samples: int = 0,
    window: int = 0,
  ):
    """Creates the submission of a replica.

    Args:
      seen: the notifications of the event loop.
      add: adds two gradients.
      max_staleness: largest staleness of a gradient, in steps; None for any.
      samples: samples of one call of `draw`; 0 if samples are not leased.
      window: see `Draws`.
    """
    self.seen, self.base = seen, seen.published
    self.sequence = 0
    self.incarnation = self.pending = -1
    self.taken: dict[int, list[Gradient]] = {}
    self.total: Any = None
    self.gradients: list[Gradient] = []
    self.draws = Draws(seen, samples, window)
    self.is_complete = False
    self.ended: Result | None = None
    self.counts: dict[str, int] = {"applied": 0}
    self._add, self._max_staleness = add, max_staleness

  @property
  def is_empty(self) -> bool:
    """Whether no gradient on `base` is in a sum."""
    return not (self.gradients or self.taken)

  # Samples.

  def draw(self) -> Spans | None:
    """The samples to compute on; None if none are leased, or the sum ends."""
    self._supersede()
    if self.draws.window and self._is_behind():
      self.drop(Reason.SUPERSEDED.value)
    if self.is_empty and not self.draws.computed and self._is_behind():
      # Nothing is computed yet, so begin on the newest parameters.
      self.finish("")
      return None
    if self.draws.window:
      self.is_complete = self._is_all()
    elif self.draws.is_leased_anew(self.base.step):
      self.finish(Reason.SUPERSEDED.value)
      return None
    return self.draws.draw(self.base.step, self._summed())

  def _summed(self) -> list[Spans]:
    """The samples of the gradients on `base`, unless these are dropped."""
    # A coordinator that has started again may have dropped sums that the last one took.
    sums = [g for s, g in self.taken.items() if not self._reason_of(s, "")]
    sums.append(self.gradients)
    return [gradient.data for gradients in sums for gradient in gradients]

  def can_draw(self) -> bool:
    """Whether there are samples, or a reason not to wait for them."""
    return (
      bool(self.draws.left(self.base.step, self._summed()))
      or self.seen.joined.incarnation != self.incarnation
      or self._is_decided()
      or (not self.taken and self._is_behind())
      or self.draws.is_leased_anew(self.base.step)
      or self._is_all()
    )

  # The sum.

  def is_late(self) -> bool:
    """Whether a gradient on `base` would be dropped now."""
    most = self._max_staleness
    return most is not None and self.seen.published.step - self.base.step > most

  def _is_behind(self) -> bool:
    return self.seen.published.step > self.base.step

  def _is_decided(self) -> bool:
    """Whether all taken sums have their outcomes, which arrive one by one."""
    outcomes = map(self._resolved, self.taken)
    return bool(self.taken) and all(outcome is not None for outcome in outcomes)

  def _supersede(self) -> bool:
    """Drops the sum if the taken sums were decided in the meantime.

    Returns:
      Whether a taken sum was applied, so that no other sum on `base` can count.
    """
    if not self._is_decided():
      return False
    reasons = [self._reason_of(sequence, "") for sequence in self.taken]
    self._count_outcomes(Reason.SUPERSEDED.value)
    self._reset()
    return "" in reasons

  def add(
    self,
    part: Any,
    batch: str,
    seconds: float | None,
  ) -> None:
    """Adds a gradient to the sum, which may make it complete.

    Args:
      part: the gradient.
      batch: its data for the journal, as JSON text.
      seconds: seconds that computing it took; None if unknown.
    """
    if self._supersede():
      self.finish(Reason.SUPERSEDED.value, 1)
      return
    data = self.draws.take() if self.draws.each else ()
    step = self.base.step
    if self.draws.window and sp.minus(data, self.draws.leased(step)):
      # Another replica was faster with some of these slots, or with the whole step.
      self.count(Reason.SUPERSEDED.value, 1)
      self.is_complete = self._is_all()
      return
    late, total = self.is_late(), None
    if not late:
      try:
        total = part if self.total is None else self._add(self.total, part)
      except Exception:
        self.drop(Reason.ABANDONED.value)  # The sum may have been donated.
        raise
    self.total = total
    self.gradients.append(Gradient(batch, seconds, data))
    self.is_complete = late or self._is_all()

  def _is_all(self) -> bool:
    """Whether the sum has all of its gradients."""
    added = len(self.gradients)
    if not self.draws.each:
      return added >= self.seen.requested
    draws, step = self.draws, self.base.step
    return (
      added > 0
      and not draws.left(step, self._summed())
      and not draws.is_over(step)
    )

  def drop(self, reason: str) -> None:
    """Drops the sum, but keeps taken sums."""
    self.count(reason, len(self.gradients))
    self.draws.forget()
    self._begin()

  def abandon(self) -> None:
    """Abandons the gradient that is being computed; its samples are drawn again."""
    self._supersede()
    if self.draws.window:
      self.count(Reason.ABANDONED.value, 1)
      self.draws.forget()
      self.draw()
    elif self.is_late():
      # Reported as stale, without a duration: the gradient was not finished.
      self.total, self.is_complete = None, True
      self.gradients.append(Gradient("null", None, ()))
    elif self.is_empty and self._is_behind():
      self.finish(Reason.ABANDONED.value, 1)
    else:
      # The gradients that are in the sum already are still valid.
      self.count(Reason.ABANDONED.value, 1)

  def submit(
    self,
    finite: bool,
    payload: bytes = b"",
    timings: Timings | None = None,
    work: bytes = b"",
  ) -> SubmitGradient:
    """Submits the sum, or reports stale gradients.

    Args:
      finite: whether all numbers of the sum are finite.
      payload: the encoded sum, if it is sent inline.
      timings: as in `SubmitGradient`.
      work: as in `SubmitGradient`.
    """
    batches, spans, seconds = [], [], 0.0
    for gradient in self.gradients:
      batches.append(gradient.batch)
      # If the duration of one gradient is unknown (NaN), so is the sum.
      seconds += math.nan if gradient.seconds is None else gradient.seconds
      if gradient.data:
        spans.append(gradient.data)
    self.pending = self.sequence
    self.sequence += 1
    self.is_complete = False
    return SubmitGradient(
      self.pending,
      self.incarnation,
      self.base.step,
      len(self.gradients),
      finite,
      payload,
      f"[{','.join(batches)}]",
      None if math.isnan(seconds) else seconds,
      timings,
      sp.join(*spans) if spans else (),
      work,
    )

  # Its outcome.

  def waits(self) -> str:
    """What the training loop waits for; "" if it can go on."""
    if self.seen.finished is not None:
      return ""
    if self.pending >= 0:
      if self.seen.answer(self.pending) is None:
        return "for this step's commit"
    elif self.ended is not None:
      if self.ended.reason == Reason.FINISHED:
        return "for the end of the run"
      if (
        self.ended.behind
        and not self._is_behind()
        and self.seen.joined.incarnation == self.incarnation
      ):
        return "for newer parameters than its stale gradient's"
      if self.seen.joined.suspended:
        # A gradient on the current state would be void: the membership has ended.
        return "to be admitted again"
    return ""

  def on_answer(self) -> None:
    """Handles the answer to the pending submission; without one the run is over."""
    answer = self.seen.answer(self.pending)
    if isinstance(answer, Taken):
      self.taken[self.pending] = self.gradients
      self._begin()
    elif (
      answer is not None
      and answer.reason
      and self.taken
      and not self._is_decided()
    ):
      self.drop(answer.reason)
    else:
      self.finish(_FINISHED)

  def finish(self, reason: str, more: int = 0) -> None:
    """Ends the sum: no more gradients are added.

    Args:
      reason: why gradients without an outcome are dropped.
      more: how many gradients are dropped that were not in the sum.
    """
    draws, forgets = self.draws, False
    if draws.each:
      forgets = bool(draws.computed) or any(self._summed())
      draws.forget()
    pending = self._count_outcomes(reason)
    self.count(reason, more)
    applied, behind = None, False
    if pending is not None:
      reason = reason if more else pending.reason
      applied = None if reason else pending
      behind = pending.reason == Reason.STALE
    self._reset()
    self.ended = Result(reason, applied, behind, forgets)

  def finish_if_over(self, more: int = 0) -> bool:
    """Ends the sum if it can't be submitted any more; returns whether it has ended.

    Args:
      more: as in `finish`.
    """
    if self.seen.finished is not None:
      self.finish(Reason.FINISHED.value, more)
    elif self.seen.joined.incarnation != self.incarnation:
      # The replica was removed and admitted again, so its gradients so far are void.
      self.finish(Reason.LOST.value, more)
    return self.ended is not None

  def resume(self, incarnation: Incarnation, base: Any) -> None:
    """Begins another sum, on this state and in this membership."""
    self.incarnation, self.base, self.ended = incarnation, base, None

  def count(self, reason: str, gradients: int) -> None:
    """Counts gradients of an outcome."""
    if gradients:
      reason = reason or "applied"
      self.counts[reason] = self.counts.get(reason, 0) + gradients

  def _count_outcomes(self, reason: str) -> Resolved | None:
    """Counts all gradients, by their outcomes, or by this reason if they have none.

    Returns:
      The outcome of the pending submission, if there is one.
    """
    for sequence, gradients in self.taken.items():
      self.count(self._reason_of(sequence, reason), len(gradients))
    pending = self._resolved(self.pending)
    if pending is not None:
      reason = pending.reason
    self.count(reason, len(self.gradients))
    return pending

  def _reason_of(self, sequence: int, otherwise: str) -> str:
    """The reason in the outcome of a submission; `otherwise` if it has no outcome."""
    outcome = self._resolved(sequence)
    return otherwise if outcome is None else outcome.reason

  def _resolved(self, sequence: int) -> Resolved | None:
    answer = self.seen.answer(sequence) if sequence >= 0 else None
    return answer if isinstance(answer, Resolved) else None

  def _reset(self) -> None:
    self.taken.clear()
    self.draws.drawn = None
    self._begin()

  def _begin(self) -> None:
    """Begins another sum."""
    self.pending, self.is_complete = -1, False
    self.total, self.gradients = None, []
