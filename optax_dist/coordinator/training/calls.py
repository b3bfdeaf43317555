"""The calls of a training loop: one at a time, and without edits of states."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterator
from typing import Any

from jax import tree_util

from optax_dist import ledger
from optax_dist.coordinator import journal
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import messages
from optax_dist.coordinator.training import preemption
from optax_dist.coordinator.training.participant import Loop, Participant
from optax_dist.coordinator.training.waiting import SynchronousLoop

# The most tokens of one step, so that the sum over a million steps fits into 64 bits.
_MOST_TOKENS = 10**12


class Views:
  """The states that a training loop has been shown, as copies of their containers.

  All replicas must have the same state, so an edit in place is found and refused.

  Example:
    >>> views, state = Views(), {"rate": 0.5}
    >>> shown = views.show("opt_state", state)
    >>> shown["rate"] = 0.25
    >>> views.check()
    Traceback (most recent call last):
      ...
    ValueError: replica.opt_state was edited in place, on this replica alone; ...
    >>> state
    {'rate': 0.5}
  """

  def __init__(self) -> None:
    # By name: the state, its leaves, and the copy that was shown.
    self._shown: dict[str, tuple[Any, list[Any], Any]] = {}

  def show(self, name: str, tree: Any) -> Any:
    """A copy of a state to look at; the same copy until the state changes."""
    known = self._shown.get(name)
    if known is None or known[0] is not tree:
      leaves, structure = tree_util.tree_flatten(tree)
      known = tree, leaves, tree_util.tree_unflatten(structure, leaves)
      self._shown[name] = known
    return known[2]

  def check(self) -> None:
    """Refuses edits of states that were shown.

    Raises:
      ValueError: a state was edited; the edit is dropped.
    """
    for name, (_, leaves, copy) in list(self._shown.items()):
      if [*map(id, leaves)] != [*map(id, tree_util.tree_leaves(copy))]:
        del self._shown[name]
        raise ValueError(
          f"replica.{name} was edited in place, on this replica alone; the edit is"
          " dropped. For a hyperparameter of optax.inject_hyperparams call"
          " replica.set_hyperparams(learning_rate=...), which sets it on all"
          " replicas. For other computations take a copy."
        )


class TrainingCalls:
  """The calls of a training loop, behind those of `Replica`.

  Attributes:
    loop: how the replica takes part in steps.
    views: what the training loop was shown.
    preempted: how it reacts to SIGTERM; None: not at all.
  """

  def __init__(
    self,
    participant: Participant,
    preempted: preemption.Preemption | None,
  ):
    """Prepares them; `loop` begins once the replica is admitted."""
    make = participant.strategy.loop or SynchronousLoop
    self.loop: Loop = make(participant)
    self.views = Views()
    self._participant, self._lock = participant, threading.RLock()
    self.preempted: preemption.Preemption | None = None
    self.heed(preempted)

  def heed(self, preempted: preemption.Preemption | None) -> None:
    """Leaves after a step once a signal has come, or during a step that takes long."""
    self.preempted = preempted
    if preempted is not None:
      inbox = self._participant.inbox
      preempted.tell, inbox.on_signal = inbox.signalled, preempted.receive
      self._participant.gives_up = lambda share: (
        preempted.look() and preempted.is_late(share)
      )

  def step(self, held: list[Any], batch: Any, tokens: int | None) -> Outcome:
    """See `Replica.step`.

    Args:
      held: a list with the gradient, which is taken out of it: if neither caller nor
        callee keeps a reference, it is freed as soon as its mean is known.
      batch: the label of its data.
      tokens: the number of tokens that it was computed on.
    """
    participant = self._participant
    phases.slow_down(time.monotonic() - participant.stopwatch.mark)
    count = 1
    if tokens is not None:
      with contextlib.suppress(TypeError):  # Not an integer: refused below.
        count = operator.index(tokens)
        if self.loop.weighs_tokens and 0 <= count <= _MOST_TOKENS:
          tokens = None
    if tokens is not None:
      raise ValueError(
        "tokens= is what decoupled_diloco weighs by, an integer from 0 to"
        f" {_MOST_TOKENS:,}; got {tokens!r} with {participant.strategy.name!r}."
      )
    self._enter()
    try:
      phases.reach("computing", participant.replica)
      participant.driver.check_process()
      participant.stopwatch.computed()
      participant.inbox.sync()
      outcome = self._ended(1)
      if outcome is None:
        label = self._label(batch)
        outcome = self.loop.add(
          participant.encoder.fit(held.pop()), label, count
        )
      return self._after(outcome)
    except preemption.Late:
      return self._left()
    finally:
      self._lock.release()

  def abandon(self) -> Outcome:
    """See `Replica.abandon`."""
    self._enter()
    try:
      self._participant.inbox.sync()
      return self._after(self._ended(1) or self.loop.abandon())
    except preemption.Late:
      return self._left()
    finally:
      self._lock.release()

  def leases(self) -> Iterator[ledger.Spans]:
    """The sample positions of each next gradient, until the run has no more."""
    while True:
      self._enter()
      try:
        spans = self._next_lease()
      except preemption.Late:
        self._left()
        spans = None
      finally:
        self._lock.release()
      if spans is None:
        return
      yield spans

  def _next_lease(self) -> ledger.Spans | None:
    """The samples of the next gradient, as soon as samples are leased."""
    participant = self._participant
    participant.driver.check_process()
    submission = participant.submission
    while True:
      if self._ended(0) is not None and self.finished():
        return None
      spans = submission.draw()
      if spans is not None:
        return spans
      if submission.ended is None:
        participant.wait(submission.can_draw, "for samples to compute on")
        participant.watch()

  def finished(self) -> bool:
    """See `Replica.finished`."""
    participant, seen = self._participant, self._participant.inbox
    if not seen.left:
      seen.sync()
      is_loop = participant.stopwatch.thread == threading.get_ident()
      if is_loop and seen.finished is not None and seen.failure is None:
        # Other replicas may have taken the last steps since this loop's last call.
        self.loop.ended(0)
    return participant.is_over

  def finish(self, reason: str) -> Outcome:
    """See `Replica.finish`."""
    participant = self._participant
    if not self.finished():
      participant.raise_failure()
      participant.driver.enqueue(messages.Finish(reason))
      over = lambda: participant.inbox.finished is not None
      try:
        participant.wait(over, "for the end of the run")
      except preemption.Late:
        self.leave()
    # If another thread is in a step, that gets the last parameters there.
    if not participant.inbox.left and self._lock.acquire(blocking=False):
      try:
        self.loop.ended(0)
      finally:
        self._lock.release()
    participant.saving = None
    return participant.outcome("finished", finished=True)

  def leave(self) -> None:
    """See `Replica.leave`."""
    if not self.finished():
      self._participant.leave()

  # Helpers.

  def _enter(self) -> None:
    """Refuses edits, and a second thread, which could get the first thread's answer."""
    if not self._lock.acquire(blocking=False):
      raise RuntimeError(
        f"Two threads are using replica {self._participant.replica!r} at once. A"
        " replica has one training loop: let one thread call step, abandon and"
        " batches."
      )
    try:
      self.views.check()
    except BaseException:
      self._lock.release()
      raise

  def _ended(self, gradients: int) -> Outcome | None:
    """The outcome to return if nothing can be submitted any more."""
    participant = self._participant
    participant.raise_failure()
    if participant.inbox.left:
      participant.submission.count("finished", gradients)
      return participant.outcome("finished", finished=True)
    return self.loop.ended(gradients)

  def _left(self) -> Outcome:
    """Leaves during a step, without waiting for the step's outcome."""
    self.leave()
    return self._participant.outcome("finished", finished=True)

  def _label(self, batch: Any) -> str:
    """A batch's label as JSON, short enough that all labels of a step fit a record."""
    if batch is None:
      return "null"
    text, most = journal.to_json("batch", batch), self._participant.most_text
    if len(text) > most:
      raise ValueError(
        f"batch must have at most {most} bytes of JSON, since all those of a step"
        f" are one record of the log; got {len(text)}."
      )
    return text

  def _after(self, outcome: Outcome) -> Outcome:
    """Announces a step to save at; after SIGTERM requests a save, or leaves."""
    participant, preempted = self._participant, self.preempted
    outcome = participant.announce(outcome)
    if preempted is None or outcome.finished:
      return outcome
    preempted.look()
    if preempted.wants_save():
      participant.driver.enqueue(messages.Save())
    decided = bool(outcome.members or outcome.reason)
    leaves = preempted.is_time(
      save=outcome.save is not None,
      settled=decided and participant.submission.is_empty,
    )
    if not participant.inbox.agree(leaves):
      return outcome
    self.leave()
    return outcome._replace(finished=True)
