"""What a replica has summed, submitted, and been notified of.

    training loop                  Submission                       event loop

    draw       -> samples of the next gradient            <-  leases
    add        -> whether the sum `is_complete`           <-  gradients asked for
    submit     ->                              Submitted  ->
    waits      -> what it waits for, "" for nothing       <-  answers, admissions
    conclude   -> the Result in `ended`
    resume     -> the next sum, on the current state      <-  published states

A sum has one gradient, or more if more are requested than there are replicas:

    draw, add, ... --> pending --> applied, or dropped with a reason --> resume
        ^                 |
        +---- partial <---+   the leader has it, and requests more gradients

A partial sum is submitted again with the gradients that were added to it. It may
also be decided while these are computed: then it has an outcome of its own, and
what was added is superseded. A gradient that is known to be stale is reported
without its numbers. Whatever happens, each gradient gets one outcome, which
`counts` has.

There is no clock, no thread and no array here: gradients and states are opaque,
and what the event loop has notified is read from `Seen`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from optax_dist.coordinator.protocol.effects import Resolved, Taken
from optax_dist.coordinator.protocol.entries import Incarnation, Work
from optax_dist.coordinator.protocol.inputs import Submitted
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp
from optax_dist.quorum import Reason


class Base(Protocol):
  """A state of the run; only its step is read here."""

  @property
  def step(self) -> int:
    """Committed steps that it includes."""
    ...


class Seen(Protocol):
  """What the event loop has notified the training loop of, until now.

  Attributes:
    published: the state that all replicas share.
    admission: number of times the replica was admitted; 0 before the first.
    suspended: whether the replica is currently not a member.
    asked: how many gradients to sum into a submission.
    finished: why the run has finished; None if it has not.
    lease: the membership that samples are leased to, and the samples.
    incarnation: of the membership; -1 before the first.
  """

  @property
  def published(self) -> Base: ...
  @property
  def admission(self) -> int: ...
  @property
  def suspended(self) -> bool: ...
  @property
  def asked(self) -> int: ...
  @property
  def finished(self) -> str | None: ...
  @property
  def lease(self) -> tuple[Incarnation, Spans]: ...
  @property
  def incarnation(self) -> Incarnation: ...

  def answer(self, sequence: int) -> Taken | Resolved | None:
    """The answer to a submission, if there is one."""
    ...


class Gradient(NamedTuple):
  """What is known of a gradient besides its numbers.

  Attributes:
    batch: its data for the journal, as JSON text.
    seconds: that computing it took; None if unknown.
    data: its samples, if samples are leased.
  """

  batch: str
  seconds: float | None
  data: Spans


class Result(NamedTuple):
  """What has become of a sum.

  Attributes:
    reason: why it was dropped, a value of `quorum.Reason`; "" otherwise.
    resolved: the outcome of what was pending, if there is one.
    settled: that outcome, and the separate one of a partial sum before it.
    forgets: whether it has samples, which other replicas get if it was dropped.
  """

  reason: str
  resolved: Resolved | None
  settled: tuple[Resolved, ...]
  forgets: bool

  @property
  def applied(self) -> Resolved | None:
    """The outcome, if it is part of a commit."""
    return None if self.reason else self.resolved


class Submission:
  """The sum of one replica, from its first gradient to its outcome.

  Attributes:
    base: the state that gradients are computed on.
    admission: the admission that they are computed in.
    sequence: number of the next submission.
    pending: the submission without an answer yet; -1: none.
    partial: the submission that the next one extends; -1: none.
    total: the sum; None without one, or where a stale gradient is reported.
    gradients: the gradients in the sum, including a partial one.
    drawn: the samples of the gradient that is computed; None: none are drawn.
    is_complete: whether the sum is to be submitted.
    ended: what has become of the last sum, until `resume`.
    counts: gradients by outcome.
  """

  def __init__(
    self,
    base: Base,
    add: Callable[[Any, Any], Any],
    *,
    max_staleness: int | None,
    samples: int = 0,
  ):
    """Creates the submission of a replica.

    Args:
      base: the state it starts from.
      add: adds two gradients.
      max_staleness: largest staleness of a gradient, in steps; None: any.
      samples: of one call of `draw`; 0: samples are not leased.
    """
    self.base = base
    self.admission = self.sequence = 0
    self.pending = self.partial = -1
    self.total: Any = None
    self.gradients: list[Gradient] = []
    self.drawn: Spans | None = None
    self.is_complete = False
    self.ended: Result | None = None
    self.counts: dict[str, int] = {"applied": 0}
    self._add, self._max_staleness = add, max_staleness
    self._samples = samples
    # How many of the gradients are in the partial sum.
    self._sent = 0
    # Leased for this sum and not drawn yet; and drawn for the next gradient,
    # which with local steps has the samples of all of them.
    self._left: Spans = ()
    self._round: list[Spans] = []

  # Samples.

  def draw(self, seen: Seen) -> Spans | None:
    """The samples to compute on; None if none are leased for now."""
    if self.drawn is None:
      if len(self.gradients) == self._sent and not self._round:
        self._left = _leased(seen)
      if not self._left:
        return None
      self.drawn, self._left = sp.head(self._left, self._samples)
    return self.drawn

  def can_draw(self, seen: Seen) -> bool:
    """Whether there are samples, or there is a reason not to wait for them."""
    return (
      bool(_leased(seen))
      or seen.admission != self.admission
      or self._resolved(seen, self.partial) is not None
    )

  def is_fresh(self) -> bool:
    """Whether nothing was computed on `base` yet."""
    return not (self.gradients or self._round)

  def keep_drawn(self) -> None:
    """Adds the drawn samples to those of the next gradient."""
    if self.drawn is not None:
      self._round.append(self.drawn)
      self.drawn = None

  # The sum.

  def is_late(self, seen: Seen) -> bool:
    """Whether a gradient on `base` would be dropped now."""
    most = self._max_staleness
    return most is not None and seen.published.step - self.base.step > most

  def supersede(self, seen: Seen) -> tuple[Resolved, ...]:
    """Drops what was added to a partial sum that was decided in the meantime.

    Gradients can't be removed from a sum.

    Returns:
      The outcome of the partial sum, if there is one.
    """
    if self.pending >= 0 or self._resolved(seen, self.partial) is None:
      return ()
    settled = self._close(seen, Reason.SUPERSEDED.value)
    self._clear()
    return settled

  def add(
    self, seen: Seen, part: Any, batch: str, seconds: float | None
  ) -> None:
    """Adds a gradient to the sum, which may make it complete."""
    late, total = self.is_late(seen), None
    if not late:
      total = part if self.total is None else self._add(self.total, part)
    self._append(total, Gradient(batch, seconds, sp.join(*self._round)))
    added = len(self.gradients) - self._sent
    more = bool(self._left) if self._samples else added < seen.asked
    self.is_complete = late or not more

  def abandon(self, seen: Seen) -> bool:
    """Gives up what is computed; returns whether it is late, and to be reported.

    Its samples stay leased, and come again.
    """
    if self.is_late(seen):
      # How long it would have taken is unknown.
      self._append(None, Gradient("null", None, ()))
      self.is_complete = True
    return self.is_complete

  def _append(self, total: Any, gradient: Gradient) -> None:
    self.total, self._round = total, []
    self.gradients.append(gradient)

  def submit(
    self,
    finite: bool,
    payload: bytes = b"",
    timings: bytes = b"",
    work: Work | None = None,
  ) -> Submitted:
    """Submits the sum, or reports stale gradients.

    Args:
      finite: whether all numbers of the sum are finite.
      payload: the encoded sum, if it is sent inline.
      timings: as in `Submitted`.
      work: as in `Submitted`.
    """
    # What is reported is not in the sum that the leader has.
    reported = self.total is None
    found = self.gradients[self._sent :] if reported else self.gradients
    seconds = [gradient.seconds for gradient in found]
    self.pending = self.sequence
    self.sequence += 1
    self.is_complete = False
    return Submitted(
      self.pending,
      -1 if reported else self.partial,
      self.admission,
      self.base.step,
      len(found),
      finite,
      payload,
      self.pending,
      f"[{','.join(gradient.batch for gradient in found)}]",
      None if None in seconds else sum(s for s in seconds if s is not None),
      timings,
      sp.join(*(gradient.data for gradient in found)),
      work,
    )

  # Its outcome.

  def waits(self, seen: Seen) -> str:
    """What the training loop waits for; "" if it can go on."""
    if seen.finished is not None:
      return ""
    if self.pending >= 0:
      answer = seen.answer(self.pending)
      if answer is None:
        return "for this step's commit"
      apart = isinstance(answer, Resolved) and answer.apart
      if apart and self._resolved(seen, self.partial) is None:
        return "for the commit of its partial sum"
    elif self.ended is not None:
      reason, resolved = self.ended.reason, self.ended.resolved
      if reason == Reason.FINISHED:
        return "for the end of the run"
      if (
        resolved is not None
        and resolved.reason == Reason.STALE
        and not resolved.apart
        and seen.published.step <= self.base.step
        and seen.admission == self.admission
      ):
        # The next gradient on these parameters would be stale as well.
        return "for newer parameters than its stale gradient's"
      if seen.suspended:
        # Every gradient on the state it has now would be worthless.
        return "to be admitted again"
    return ""

  def conclude(self, seen: Seen) -> None:
    """Handles the answer to what is pending; without one the run is over."""
    if isinstance(seen.answer(self.pending), Taken):
      self.partial, self.pending = self.pending, -1
      self._sent = len(self.gradients)
    else:
      self.end(seen, Reason.FINISHED.value)

  def end(self, seen: Seen, reason: str, more: int = 0) -> None:
    """Ends the sum, of which nothing is computed any more.

    Args:
      seen: what was notified.
      reason: why what has no outcome is dropped.
      more: gradients that are dropped without having been in the sum.
    """
    resolved = self._resolved(seen, self.pending)
    forgets = bool(self._round) or any(g.data for g in self.gradients)
    settled = self._close(seen, reason)
    self.count(reason, more)
    if resolved is not None and not more:
      reason = resolved.reason
    self._clear()
    self._round = []
    self.ended = Result(reason, resolved, settled, forgets)

  def resume(self, admission: int, base: Base) -> None:
    """Begins another sum, on this state and in this admission."""
    self.admission, self.base, self.ended = admission, base, None

  def count(self, reason: str, gradients: int) -> None:
    """Counts gradients of an outcome."""
    if gradients:
      reason = reason or "applied"
      self.counts[reason] = self.counts.get(reason, 0) + gradients

  def _close(self, seen: Seen, reason: str) -> tuple[Resolved, ...]:
    """Counts all gradients: by their outcome, or this reason without one."""
    partial = self._resolved(seen, self.partial)
    pending = self._resolved(seen, self.pending)
    rest = len(self.gradients)
    if partial is not None:
      rest -= self._sent
      self.count(partial.reason, self._sent)
    self.count(reason if pending is None else pending.reason, rest)
    return tuple(r for r in (partial, pending) if r is not None)

  def _resolved(self, seen: Seen, sequence: int) -> Resolved | None:
    answer = seen.answer(sequence) if sequence >= 0 else None
    return answer if isinstance(answer, Resolved) else None

  def _clear(self) -> None:
    self.pending = self.partial = -1
    self.total, self.gradients, self._sent = None, [], 0
    self.drawn, self._left, self.is_complete = None, (), False


def has_counted(resolved: Resolved) -> bool | None:
  """Whether a submission was committed; None if unknown."""
  lost = resolved.reason == Reason.LOST
  return None if lost else not resolved.reason


def _leased(seen: Seen) -> Spans:
  """What is leased to the current membership."""
  incarnation, spans = seen.lease
  return spans if incarnation == seen.incarnation else ()
