"""A learner: a replica that never waits, and merges one fragment at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist import quorum
from optax_dist.coordinator import options
from optax_dist.coordinator.aggregation import wire_formats
from optax_dist.coordinator.aggregation.error_feedback import ErrorFeedback
from optax_dist.coordinator.extras.decoupled_diloco.rounds import WORK, Work
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol.effects import Resolved
from optax_dist.coordinator.replica import Replica


class Learner(Replica):
  """A replica whose training loop never waits.

  A step is one step of its own optimizer. Contributions are submitted when the
  strategy says so; their outcomes and the other replicas' rounds are merged
  before the first step that finds them complete.
  """

  _weighs_tokens = True
  # Each fragment has its own error feedback.
  _encoder_feeds_back = False

  @property
  def _learning(self) -> Any:
    """The strategy, a `DecoupledDiloco`, which names this class."""
    return self._strategy

  @functools.cached_property
  def _feedback(self) -> ErrorFeedback | None:
    """The unsent residual of each fragment; None if everything is sent."""
    settings = self._settings
    if not wire_formats.feeds_back(settings.wire):
      return None
    return ErrorFeedback(settings.error_feedback)

  def _check(self, settings: options.Options) -> None:
    super()._check(settings)
    if self.processes.count > 1:
      raise ValueError(
        "decoupled DiLoCo is for replicas of one process, got one of"
        f" {self.processes.count}: each takes a fragment in when it is there, and"
        " a step of all processes together needs it at the same time. Make each"
        " process a learner of its own (processes_per_replica=1), or have one"
        " process drive all devices of a host."
      )

  @functools.cached_property
  def _lends(self) -> bool:
    """Whether the inner optimizer's state can be served: it is all arrays."""
    leaves = jax.tree.leaves(self._local.opt_state)
    return all(isinstance(x, jax.Array | np.ndarray) for x in leaves)

  def _own(self) -> Any:
    # An optimizer with any other state starts fresh on every replica.
    return self._local.opt_state if self._lends else None

  def _initial_local_state(self) -> Any:
    local = super()._initial_local_state()
    lent = self._driver.take_borrowed()
    # The replica that served it may have had non-finite numbers.
    if lent is None or not _is_finite(lent):
      return local
    self._driver.lend(lent)
    return local._replace(opt_state=lent)

  @functools.cached_property
  def _batches(self) -> list[str]:
    """The batches of its own steps since the last contribution."""
    return []

  def _starts_submission(self) -> bool:
    return not self._batches

  def _advance(self, grads: Any, text: str, tokens: int) -> Outcome:
    self._batches.append(text)
    self._local = self._learning.train(self._local, grads, tokens)
    self._driver.lend(self._own())
    return self._catch_up()

  def _over(self, gradients: int) -> Outcome | None:
    submission, seen = self._submission, self._handover
    admission = seen.admission
    if admission != submission.admission and not self._has_finished():
      # Its local state is as good as before.
      submission.end(seen, "lost")
      self._concluded(admission)
    return super()._over(0)  # What was not submitted is no contribution.

  def _conclude(self) -> Outcome | None:
    return None  # It does not wait.

  def _catch_up(self) -> Outcome:
    """Merges what has arrived and submits what is due, without waiting."""
    submission, seen = self._submission, self._handover
    # Before the state, which is as new as the answers.
    pending = submission.pending
    resolved = pending >= 0 and seen.answer(pending) is not None
    published = seen.published
    told = self._outcome()
    if not published.is_ready:
      # Even if there is an answer: the merged state is still being computed.
      self._begin()
      return told
    if resolved:
      submission.conclude(seen)
      told = self._concluded(submission.admission)
    if submission.pending < 0:
      if published.step > submission.base.step:
        self._local = self._learning.take_in(
          published.get(), self._local, resolved and told.accepted
        )
        submission.resume(submission.admission, published)
      newest = seen.published.step == submission.base.step
      called = seen.called == submission.base.step
      if (
        newest
        and not seen.suspended
        and self._learning.is_due(self._local, called)
      ):
        self._give(called)
    self._begin()
    return told._replace(global_step=submission.base.step)

  def _concluded(self, admission: int) -> Outcome:
    """Handles a contribution's outcome."""
    submission, result = self._submission, self._submission.ended
    assert result is not None
    self._settle()
    submission.resume(admission, submission.base)
    self._handover.forget(submission.sequence, self._held_steps())
    if result.reason == quorum.Reason.NON_FINITE:
      # The learner's own numbers are useless now.
      self._local = self._learning.local(self._shared)
    members = () if result.applied is None else result.applied.members
    told = self._outcome(result.reason)
    return told._replace(members=members)

  def _give(self, called: bool) -> None:
    """Submits a contribution to the open round."""
    self._owed = None
    if self._feedback is not None:
      fragment = self._learning.fragment(self._local)
      self._owed = self._feedback.owed(self._learning.size, fragment)
    given, self._local = self._learning.give(
      self._shared, self._local, called, self._owed
    )
    computed = self._stopwatch.take()
    seconds = computed / max(1, len(self._batches))
    work = Work(given.tokens, given.steps, seconds, given.late, given.begins)
    batches = ",".join(self._batches)
    self._submission.add(self._handover, given.payload, batches, computed)
    self._submit(WORK.encode(work))
    self._batches.clear()

  def _write(self, out: np.ndarray) -> list[memoryview] | None:
    written = super()._write(out)
    if written is not None and self._feedback is not None:
      fragment = self._learning.fragment(self._local)
      heard = self._encoder.heard(out)[0]
      payload, kept = self._learning.sent(
        fragment, self._submission.total, heard, self._owed
      )
      for index, leaf in enumerate(payload[1:], 1):
        self._encoder.correct(index, leaf, out)
      self._feedback.left_out(
        np.asarray(kept), self._submission.sequence, fragment
      )
    return written

  def _stays_in_place(self) -> bool:
    # It continues to train, and may donate the arrays.
    return False

  def _sizes(self) -> Sequence[int]:
    return self._learning.sizes(self._learning.fragment(self._local))

  def _keep_residual(self, resolved: Resolved) -> None:
    if self._feedback is not None:
      self._feedback.settle(resolved.sequence, resolved.counted)


def _is_finite(tree: Any) -> bool:
  floats = [
    x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  return all(bool(jnp.isfinite(x).all()) for x in floats)
