"""The training loop of a learner, which never waits and merges fragments."""

from __future__ import annotations

from typing import Any

from optax_dist import quorum
from optax_dist.coordinator.extras.decoupled_diloco.rounds import WORK
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.training.participant import Participant


class Learner:
  """Takes steps of its own optimizer; see `participant.Loop`.

  Contributions are submitted when the strategy says so; their outcomes and the
  other replicas' rounds are merged after the first step that finds them
  complete.
  """

  weighs_tokens = True

  def __init__(self, participant: Participant):
    """Takes the local state that the strategy starts from."""
    self._participant = participant
    # A `DecoupledDiloco`, which names this class.
    self._strategy: Any = participant.strategy
    self.local: Any = None
    # The batch labels of its own steps since the last contribution; left out of the
    # record if they are too long.
    self._batches: list[str] = []

  def begin(self, warm: bool = False) -> None:
    participant = self._participant
    self.local = participant.fresh_local()
    self._compute()

  def _compute(self) -> None:
    self._participant.compute(first=not self._batches)

  def add(self, grads: Any, batch: str, tokens: int) -> Outcome:
    self._batches.append(batch)
    self.local = self._strategy.train(self.local, grads, tokens)
    return self.abandon()

  def abandon(self) -> Outcome:
    """Merges what has arrived and submits what is due, without waiting."""
    participant, strategy = self._participant, self._strategy
    submission, seen = participant.submission, participant.inbox
    # The answer is read before the state, so that the state includes its commit.
    pending = submission.pending
    resolved = pending >= 0 and seen.answer(pending) is not None
    published = seen.published
    outcome = participant.outcome()
    # Even if there is an answer, the merged state may still be being computed.
    if published.is_ready:
      if resolved:
        submission.on_answer()
        outcome = self._on_outcome(submission.incarnation)
      if submission.pending < 0:
        if published.step > submission.base.step:
          merged = resolved and outcome.accepted
          self.local = strategy.merge(published.get(), self.local, merged)
          submission.resume(submission.incarnation, published)
        newest = seen.published.step == submission.base.step
        called = seen.called == submission.base.step
        is_due = newest and strategy.is_due(self.local, called)
        if is_due and not seen.joined.suspended:
          self._contribute(called)
    self._compute()
    return outcome._replace(global_step=submission.base.step)

  def ended(self, gradients: int) -> Outcome | None:
    # Gradients that were not submitted are part of the local parameters, not lost.
    del gradients
    participant = self._participant
    submission, seen = participant.submission, participant.inbox
    incarnation = seen.joined.incarnation
    if seen.finished is None:
      if incarnation != submission.incarnation:
        # The learner was removed and admitted again, but keeps its local state.
        submission.finish("lost")
        self._on_outcome(incarnation)
      return None
    submission.finish("finished")
    outcome = self._on_outcome(incarnation)
    participant.resume()
    # So that all learners end with the same parameters.
    inner = self.local.opt_state
    self.local = self._strategy.local(participant.shared, inner)
    step = submission.base.step
    return outcome._replace(global_step=step, finished=True)

  def _on_outcome(self, incarnation: int) -> Outcome:
    """Handles a contribution's outcome."""
    participant = self._participant
    submission, result = participant.submission, participant.submission.ended
    assert result is not None
    submission.resume(incarnation, submission.base)
    participant.forget()
    if result.reason == quorum.Reason.NON_FINITE:
      # The learner's own numbers are useless now.
      self.local = participant.fresh_local()
    applied = result.applied
    if applied is None:
      return participant.outcome(result.reason)
    return participant.outcome(members=applied.members, committed=applied.step)

  def _contribute(self, called: bool) -> None:
    """Submits a contribution to the open round."""
    participant = self._participant
    seconds = participant.stopwatch.take()
    step_seconds = seconds / max(1, len(self._batches))
    payload, work, self.local = self._strategy.contribute(
      participant.shared, self.local, called, step_seconds
    )
    batches = ",".join(self._batches)
    if len(batches) > participant.most_text:
      # The contribution has waited over many steps, so its labels are too long.
      batches = "null"
    participant.submission.add(payload, batches, seconds)
    inner = self._strategy.inner_state(self.local)
    participant.submit(inner, WORK.encode(work))
    self._batches.clear()
