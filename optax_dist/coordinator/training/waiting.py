"""The training loop of replicas that wait for the outcome of what they submit."""

from __future__ import annotations

import math
import time
from typing import Any, cast

from optax_dist import quorum
from optax_dist.coordinator import strategies
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol.policies.policy import SHARE, Share
from optax_dist.coordinator.training.participant import Participant

# How long another local step may take, for one that took 1; and seconds for which a
# step is waited for that takes longer than expected.
_MARGIN, _LATE = 1.25, 0.5


class SynchronousLoop:
  """Adds up gradients, submits the sum, and waits for its outcome.

  See `participant.Loop`.
  """

  weighs_tokens = False

  def __init__(self, participant: Participant):
    """Takes the local state that the strategy starts from."""
    self._participant = participant
    self._strategy = cast(strategies.WaitingStrategy, participant.strategy)
    self.local: Any = None
    # When the last local step was taken: before the first, after all times; and
    # what is said of a round that is shorter.
    self._stepped, self._work = math.inf, b""

  def begin(self, warm: bool = False) -> None:
    self.local = self._participant.fresh_local()
    self._compute()
    if warm:
      # Nothing has to be compiled in the first local step.
      self._stepped = time.monotonic()
      self._skip()

  def _skip(self) -> None:
    """Begins with the next step, amid one whose gradient would come too late."""
    participant, seen = self._participant, self._participant.inbox
    left = seen.joined.round_ends - time.monotonic()
    amid = self._strategy.so_far(participant.shared, self.local) is not None
    if math.isinf(left) or amid or participant.strategy.quorum.max_staleness:
      return
    is_late = participant.submission.is_late
    # The others may be gone by then.
    left = max(0.0, left)
    if seen.wait(is_late, max(_MARGIN * left, left + _LATE)) and is_late():
      self.abandon()

  def _compute(self) -> None:
    self._participant.compute(first=not self._participant.submission.gradients)

  def add(self, grads: Any, batch: str, tokens: int) -> Outcome:
    participant, submission = self._participant, self._participant.submission
    samples = participant.samples
    if samples.data is not None and submission.draws.drawn is None:
      raise ValueError(
        "step() needs the samples of its gradient: iterate over batches()."
      )
    part, self.local = self._strategy.contribute(
      participant.shared, self.local, grads
    )
    # Whoever waits for a step does not hold its gradient.
    del grads
    if samples.sums is not None and submission.draws.drawn is not None:
      leaves = participant.encoder.split(part)
      part = samples.sums.encode(submission.draws.drawn, leaves)
    if samples.data is not None:
      submission.draws.keep()
    if part is None and not submission.is_late():
      part = self._cut_short()
    if part is not None:
      seconds = participant.stopwatch.take()
      submission.add(part, batch, seconds)
      del part
    elif submission.is_late():
      # Its round has been taken without it: the rest would be for nothing.
      submission.abandon()
    return self._submit_and_wait() or participant.outcome()

  def _cut_short(self) -> Any:
    """What there is of a first round, if another local step would be too late."""
    seen, now = self._participant.inbox, time.monotonic()
    took, self._stepped = now - self._stepped, now
    if math.isinf(seen.joined.round_ends):
      return None
    if not seen.agree(now + _MARGIN * took > seen.joined.round_ends):
      return None
    part_and_share = self._strategy.so_far(self._participant.shared, self.local)
    if part_and_share is None:
      return None
    part, share = part_and_share
    self._work = SHARE.encode(Share(share))
    return part

  def abandon(self) -> Outcome:
    participant = self._participant
    participant.submission.abandon()
    outcome = self._submit_and_wait()
    if outcome is None:
      self._compute()
    return outcome or participant.outcome("abandoned")

  def ended(self, gradients: int) -> Outcome | None:
    submission = self._participant.submission
    # What a call that was interrupted has left.
    outcome = self._submit_and_wait()
    if submission.finish_if_over(gradients):
      return self._finish_step()
    if outcome and gradients and submission.is_empty:
      # This gradient is as old as the sum that was left.
      submission.finish("stale", 1)
      return self._finish_step()
    return None

  def _submit_and_wait(self) -> Outcome | None:
    """Submits a complete sum and waits for its outcome; None without one."""
    participant, submission = self._participant, self._participant.submission
    start = time.monotonic()
    if submission.is_complete:
      participant.submit(self._strategy.inner_state(self.local), self._work)
    if submission.pending < 0:
      return None if submission.ended is None else self._finish_step()
    self._wait()
    waited = time.monotonic() - start
    submission.on_answer()
    return self._finish_step(waited)

  def _wait(self) -> None:
    waits, seen = self._participant.submission.waits, self._participant.inbox
    while (what := waits()) and not seen.left:
      self._participant.wait(lambda: waits() != what, what)

  def _finish_step(self, waited: float = 0.0) -> Outcome:
    """Continues with the same sum, or with another one.

    Args:
      waited: seconds that it has waited for the outcome.
    """
    participant, strategy = self._participant, self._strategy
    result, before = participant.submission.ended, None
    if result is None:
      self._compute()
      return participant.outcome(waited=waited)
    participant.inbox.joined.round_ends, self._work = math.inf, b""
    applied = result.applied
    # What was computed of the next gradient is dropped.
    participant.stopwatch.take()
    if applied is not None and strategy.reads_before:
      before = participant.computed(participant.inbox.before(applied.sequence))
    self._wait()
    if result.reason == quorum.Reason.LOST:
      participant.raise_failure()  # With which it may have been lost.
    participant.resume()
    if result.reason == quorum.Reason.NON_FINITE:
      # So are its own numbers, perhaps.
      self.local = participant.fresh_local()
    elif result.forgets and result.reason not in ("", "finished"):
      # Its samples go to another replica.
      inner = strategy.inner_state(self.local)
      self.local = strategy.local(participant.shared, inner)
    else:
      self.local = strategy.settle(
        before, participant.shared, self.local, mine=applied is not None
      )
    self._compute()
    if applied is None:
      return participant.outcome(
        result.reason, finished=participant.is_over, waited=waited
      )
    return participant.outcome(
      waited=waited,
      members=applied.members,
      staleness=applied.staleness,
      committed=applied.step,
    )
