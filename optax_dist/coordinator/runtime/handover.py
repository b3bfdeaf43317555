"""What the event loop and the training loop tell each other."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable

from optax_dist.coordinator.protocol import effects
from optax_dist.coordinator.runtime.states import State
from optax_dist.ledger import Progress, Spans

# Steps whose progress is kept: more than a replica may be behind.
_KEPT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """What became of a submission.

  Attributes:
    resolved: in the protocol's words.
    before: the state before the commit that it was part of.
  """

  resolved: effects.Resolved
  before: State


class Handover:
  """Written by the event loop, and read by the training loop.

  The event loop sets fields and then calls `tell`; the training loop reads them,
  or waits in `wait`.

  Attributes:
    published: the state that all share.
    to_save: the latest state that all replicas save; None: none so far.
    admission: counts the times at which the replica was let in; 0: not yet.
    suspended: whether the replica is no member at present.
    asked: how many gradients a submission sums.
    called: the step to whose round others have given; -1: none so far.
    left: whether the replica has left, as was wanted.
    finished: why the run has ended well; None: it has not.
    failure: why the run can't go on for this replica.
    leads: whether this process is leader.
    memory: buffers that the event loop has made for gradients.
    lease: the membership that samples are leased to, and the samples.
    incarnation: of the membership; -1: none so far.
    progress: which samples are in committed steps, by step.
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
    self.memory: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    self._changed = threading.Condition()
    self._outcomes: dict[int, Outcome | effects.Taken] = {}

  # The event loop's.

  def change(self, action: Callable[[Handover], None]) -> None:
    """Something has happened that the training loop decides by."""
    action(self)

  def tell(self) -> None:
    """What waits looks again."""
    with self._changed:
      self._changed.notify_all()

  def resolve(self, sequence: int, outcome: Outcome | effects.Taken) -> None:
    """Has an answer to a submission; `tell` follows."""
    self._outcomes[sequence] = outcome

  def progressed(self, step: int, progress: Progress) -> None:
    """So much is committed with this step."""
    self.progress[step] = progress
    if len(self.progress) > _KEPT:
      saved = -1 if self.to_save is None else self.to_save.step
      for old in sorted(self.progress)[: _KEPT // 2]:
        if old != saved:
          del self.progress[old]

  # The training loop's.

  def sync(self) -> None:
    """Looks at what has happened; where there is one process, it sees it."""

  def agree(self, flag: bool) -> bool:
    """What process 0 says, where there are several."""
    return flag

  def close(self) -> None:
    """Nothing will happen any more."""

  def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
    """Waits until it is ready, or the run is over; returns whether it is."""
    over = lambda: self.failure is not None or self.finished is not None
    with self._changed:
      self._changed.wait_for(lambda: ready() or over(), timeout)
    return ready()

  def outcome(self, sequence: int) -> Outcome | effects.Taken | None:
    """The answer to a submission, if it is there."""
    return self._outcomes.get(sequence)

  def take(self, sequence: int) -> Outcome | effects.Taken | None:
    """The same, once."""
    return self._outcomes.pop(sequence, None)
