"""The training loop of replicas that wait for the outcome of what they submit."""

from __future__ import annotations

import time
from typing import Any, cast

from optax_dist.coordinator import strategies
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol.leader import audit
from optax_dist.coordinator.session import Session


class WaitingLoop:
  """Adds up gradients, submits the sum, and waits for its outcome.

  See `session.Loop`.
  """

  def __init__(self, session: Session):
    """Takes the local state that the strategy starts from."""
    self._session = session
    self._strategy = cast(strategies.WaitingStrategy, session.strategy)
    self.local: Any = None

  def begin(self) -> None:
    self.local = self._strategy.local(self._session.shared)
    self._compute()

  def _compute(self) -> None:
    self._session.compute(first=not self._session.submission.gradients)

  def add(self, grads: Any, batch: str, tokens: int) -> Outcome:
    session, submission = self._session, self._session.submission
    if session.indices is not None and submission.drawn is None:
      raise ValueError(
        "step() needs the samples of its gradient: iterate over batches()."
      )
    part, self.local = self._strategy.contribute(
      session.shared, self.local, grads
    )
    zeros, work = 0, b""
    if session.slots is not None and submission.drawn is not None:
      spans = submission.drawn
      leaves = session.update.split(part)
      part = session.summing.encode(session.slots.number(spans), leaves)
      zeros = part.zeros
      if session.slots.data.audited(spans):
        work = audit.pack(spans[0][0], part.digest())
    submission.keep_drawn()
    if part is not None:
      seconds = session.stopwatch.take()
      submission.add(session.handover, part, batch, seconds, work)
    return (self._conclude() or session.outcome())._replace(zeros=zeros)

  def abandon(self) -> Outcome:
    session = self._session
    session.submission.abandon(session.handover)
    outcome = self._conclude()
    if outcome is None:
      self._compute()
    return outcome or session.outcome("abandoned")

  def ended(self, gradients: int) -> Outcome | None:
    session, submission = self._session, self._session.submission
    # What a call that was interrupted has left.
    concluded = self._conclude()
    if submission.expire(session.handover, gradients):
      return self._go_on()
    if concluded and gradients and not submission.gradients:
      # This gradient is as old as the sum that was left.
      submission.end(session.handover, "stale", 1)
      return self._go_on()
    return None

  def _conclude(self) -> Outcome | None:
    """Submits a complete sum and waits for its outcome; None without one."""
    session, submission = self._session, self._session.submission
    start = time.monotonic()
    if submission.is_complete:
      session.settle(session.encoder.settle)
      session.submit()
    if submission.pending < 0:
      return None if submission.ended is None else self._go_on()
    self._wait()
    waited = time.monotonic() - start
    submission.conclude(session.handover)
    return self._go_on()._replace(waited=waited)

  def _wait(self) -> None:
    session = self._session
    waits = lambda: session.submission.waits(session.handover)
    while what := waits():
      session.wait(lambda: waits() != what, what)

  def _go_on(self) -> Outcome:
    """Continues with the same sum, or with another one."""
    session, strategy = self._session, self._strategy
    result, before = session.submission.ended, session.shared
    if result is None:
      self._compute()
      return session.outcome()
    session.settle(session.encoder.settle)
    applied = result.applied
    # What was computed of the next gradient is dropped.
    session.stopwatch.take()
    if applied is not None:
      before = session.handover.before(applied.sequence).get()
    self._wait()
    session.resume()
    if result.forgets and result.reason not in ("", "finished"):
      self.local = strategy.forget(session.shared, self.local)
    else:
      self.local = strategy.settle(
        before, session.shared, self.local, mine=applied is not None
      )
    self._compute()
    if applied is None:
      finished = session.handover.finished is not None
      return session.outcome(result.reason, finished=finished)
    return session.outcome(members=applied.members, staleness=applied.staleness)
