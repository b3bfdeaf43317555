"""The state shared by the event loop and the training loop."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

from optax_dist.coordinator.protocol import effects
from optax_dist.coordinator.runtime.states import State
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.ledger import Progress, Spans

# Seconds within which a waiting thread looks at its clock.
_SLICE = 2.0
# Steps whose progress is kept, besides those that the training loop holds.
_KEPT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """The outcome of a submission.

  Attributes:
    resolved: the protocol's outcome.
    before: the state before the commit that included it.
  """

  resolved: effects.Resolved
  before: State


class Handover:
  """Written by the event loop, and read by the training loop.

  The event loop sets fields and then calls `tell`; the training loop reads them,
  or waits in `wait`.

  Attributes:
    published: the state that all replicas share.
    to_save: the last state that all replicas save; None if there is none yet.
    admission: number of times the replica was admitted; 0 before the first.
    suspended: whether the replica is currently not a member.
    asked: how many gradients to sum into a submission.
    called: the last step whose round has contributions of others; -1: none yet.
    left: whether the replica has left on its own request.
    finished: why the run has finished; None if it has not.
    failure: the error that ends the run for this replica.
    leads: whether this process is leader.
    memory: buffers for gradients, allocated by the event loop.
    lease: the membership that samples are leased to, and the samples.
    incarnation: of the membership; -1 before the first.
    progress: which samples are in committed steps, by step.
    held: the steps of states that the training loop holds; it may ask for their
      progress at any time. The event loop calls it.
  """

  def __init__(self, published: State):
    self.published = published
    self.to_save: State | None = None
    self.admission = 0
    self.suspended = False
    self.asked = 1
    self.called = -1
    self.left = False
    self.finished: str | None = None
    self.failure: BaseException | None = None
    self.leads = False
    self.lease: tuple[int, Spans] = (-1, ())
    self.incarnation = -1
    self.progress: dict[int, Progress] = {}
    self.held: Callable[[], Sequence[int]] = tuple
    self.memory: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    self._changed = threading.Condition()
    self._outcomes: dict[int, Outcome | effects.Taken] = {}

  # Called by the event loop.

  def change(self, action: Callable[[Handover], None]) -> None:
    """Changes a field that the training loop depends on."""
    action(self)

  def tell(self) -> None:
    """Wakes up the waiting threads."""
    with self._changed:
      self._changed.notify_all()

  def resolve(self, sequence: int, outcome: Outcome | effects.Taken) -> None:
    """Stores the answer to a submission; `tell` follows."""
    self._outcomes[sequence] = outcome

  def lend(self, incarnation: int, spans: Spans) -> None:
    """A membership computes on these samples next; `tell` follows."""
    self.lease = incarnation, spans

  def progressed(self, step: int, progress: Progress) -> None:
    """Stores which samples are committed as of this step."""
    self.progress[step] = progress
    if len(self.progress) > _KEPT:
      kept = {*self.held()}
      if self.to_save is not None:
        kept.add(self.to_save.step)
      for old in sorted(self.progress)[: _KEPT // 2]:
        if old not in kept:
          del self.progress[old]

  # Called by the training loop.

  def sync(self) -> None:
    """Applies events so far; a single process sees them directly."""

  def agree(self, flag: bool) -> bool:
    """Process 0's value of the flag, if there are several processes."""
    return flag

  def close(self) -> None:
    """Marks that nothing will change any more."""

  def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
    """Waits until `ready` or the run's end; returns whether it is ready.

    Args:
      ready: what to wait for.
      timeout: seconds; those in which this process was stopped don't count.
    """
    over = lambda: self.failure is not None or self.finished is not None
    self._wait_for(lambda: ready() or over(), timeout)
    return ready()

  def _wait_for(self, predicate: Callable[[], bool], timeout: float) -> float:
    """Waits for so many seconds awake; returns how many it waited."""
    clock = AwakeClock(_SLICE)
    start = clock.now()
    end = start + timeout
    with self._changed:
      while not predicate() and (left := end - clock.now()) > 0:
        self._changed.wait_for(predicate, min(left, _SLICE / 2))
    return clock.now() - start

  def outcome(self, sequence: int) -> Outcome | effects.Taken | None:
    """The answer to a submission, if there is one."""
    return self._outcomes.get(sequence)

  def take(self, sequence: int) -> Outcome | effects.Taken | None:
    """Removes and returns the answer."""
    return self._outcomes.pop(sequence, None)
