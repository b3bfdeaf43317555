"""The loop of replicas that wait for the outcome of each submission."""

from __future__ import annotations

import math
import time
from typing import Any, cast

from optax_dist import quorum
from optax_dist.coordinator import strategies
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol.policies.policy import SHARE, Share
from optax_dist.coordinator.training.participant import Participant

# How much longer than the last local step another one is assumed to take; and for how
# many seconds to wait for a step that takes longer than expected.
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
    # When the last local step was taken, infinity before the first; and the share of a
    # shorter round, as the policy gets it.
    self._stepped, self._work = math.inf, b""

  def begin(self, warm: bool = False) -> None:
    self.local = self._participant.fresh_local()
    self._compute()
    if warm:
      # The first local step compiles nothing, so its duration can be measured.
      self._stepped = time.monotonic()
      self._skip()

  def _skip(self) -> None:
    """If a gradient for the current step would be too late, begins with the next."""
    participant, seen = self._participant, self._participant.inbox
    left = seen.joined.round_ends - time.monotonic()
    amid = self._strategy.so_far(participant.shared, self.local) is not None
    if math.isinf(left) or amid or participant.strategy.quorum.max_staleness:
      return
    is_late = participant.submission.is_late
    # The wait is limited, since the step's other members may be lost before it ends.
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
    # So that the gradient can be freed while the loop waits for the step.
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
      # The round is over without this replica, so more local steps would be in vain.
      submission.abandon()
    return self._submit_and_wait() or participant.outcome()

  def _cut_short(self) -> Any:
    """The unfinished part of a first round, if another local step would be too late."""
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
    # An interrupted call may have left a sum without its outcome.
    outcome = self._submit_and_wait()
    if submission.finish_if_over(gradients):
      return self._finish_step()
    if outcome and gradients and submission.is_empty:
      # The new gradient is on the same parameters as that sum, so it is stale.
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
    """Continues with the same sum, or begins another one.

    Args:
      waited: seconds for which the loop has waited for the outcome.
    """
    participant, strategy = self._participant, self._strategy
    result, before = participant.submission.ended, None
    if result is None:
      self._compute()
      return participant.outcome(waited=waited)
    participant.inbox.joined.round_ends, self._work = math.inf, b""
    applied = result.applied
    # Drops the time of the gradient that was being computed.
    participant.stopwatch.take()
    if applied is not None and strategy.reads_before:
      before = participant.computed(participant.inbox.before(applied.sequence))
    self._wait()
    if result.reason == quorum.Reason.LOST:
      participant.raise_failure()  # The failure may be why the gradient was lost.
    participant.resume()
    if result.reason == quorum.Reason.NON_FINITE:
      # The local state may not be finite either.
      self.local = participant.fresh_local()
    elif result.forgets and result.reason not in ("", "finished"):
      # Another replica gets the samples, so the local steps on them are undone.
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
