"""The event loop's notifications for the training loop.

    event loop                  TrainingInbox                  training loop

    notify(event)  ->  fields, answers to submissions  ->  reads them
    wake()         ------------------------------------>   returns from `wait`

An event is an effect of the protocol core that concerns the training loop, or a
`Published` state. There are no locks around the fields: each event sets them in
the order in which the training loop may rely on them.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, assert_never

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.entries import Lineage
from optax_dist.coordinator.protocol.messages import Call
from optax_dist.coordinator.runtime.states import State
from optax_dist.ledger import Progress, Spans

# A waiting thread wakes at least this often, in seconds. A longer sleep means that the
# process was stopped, and that time does not count.
_POLL_SECONDS = 1.0


class Published(NamedTuple):
  """A state was published; `save` if all replicas save it."""

  state: State
  save: bool


Event: TypeAlias = fx.Answer | fx.Notice | Published


@dataclasses.dataclass(slots=True)
class Joined:
  """The run that a replica has joined, and its membership.

  Attributes:
    run_id: identifies the run; "" until it is known.
    lineage: the runs that the run continues.
    incarnation: incarnation of the membership; -1 before the first.
    suspended: whether the replica is currently not a member.
    rejoins: number of times the replica was admitted again.
    round_ends: when the step during which the replica has joined is expected to end,
      by `time.monotonic`; infinity if that step waits for the replica, or is over.
  """

  run_id: str = ""
  lineage: Lineage = ()
  incarnation: int = -1
  suspended: bool = False
  rejoins: int = 0
  round_ends: float = math.inf


class TrainingInbox:
  """Written by the event loop, and read by the training loop.

  Attributes:
    published: the state that all replicas share.
    to_save: the last state that all replicas save; None if there is none yet.
    joined: the run that the replica has joined.
    requested: how many gradients to sum into a submission.
    called: the last step for which the coordinator has sent `Call`; -1 for none.
    left: whether the replica has left on its own request.
    finished: why the run has finished; None if it has not.
    failure: the error that ends the run for this replica.
    lease: the membership that samples are leased to, and the samples.
    progress: which samples are in committed steps, by step.
    keeps_before: whether the state before a commit will be read.
    on_finished: called when the run has finished, before the training loop
      knows.
    on_signal: called with a signal that another process of the replica has got.
  """

  def __init__(self, published: State):
    self.published = published
    self.to_save: State | None = None
    self.joined = Joined()
    self.requested = 1
    self.called = -1
    self.left = False
    self.finished: str | None = None
    self.failure: BaseException | None = None
    self.lease: tuple[int, Spans] = (-1, ())
    self.progress: dict[int, Progress] = {}
    self.keeps_before = False
    self.on_finished: Callable[[], None] = lambda: None
    self.on_signal: Callable[[int], None] = lambda number: None
    # Released whenever anything changes that a thread may wait for.
    self._changed = threading.Lock()
    self._changed.acquire()
    published.before = published
    # The answer to each submission, and the state before the latest commit then.
    self._answers: dict[int, tuple[fx.Answer, State]] = {}

  # Called by the event loop.

  def fail(self, error: BaseException) -> None:
    """Ends the run for this replica, if it has not failed before."""
    if self.failure is None:
      self.failure = error

  def notify(self, event: Event) -> None:
    """Notifies the training loop of an event; `wake` follows."""
    match event:
      case Published(state, save):
        last, self.published = self.published, state
        # After a snapshot of several commits the state before it is unknown, and the
        # published state itself takes its place.
        keeps = self.keeps_before and state.step == last.step + 1
        state.before = last if keeps else state
        last.before = None
        if save:
          self.to_save = state
      case fx.Taken() | fx.Resolved():
        before = self.published.before or self.published
        self._answers[event.sequence] = event, before
      case fx.Admitted(incarnation, ends_in):
        joined = self.joined
        joined.rejoins += joined.incarnation >= 0
        left = math.inf if ends_in is None else ends_in
        joined.round_ends = time.monotonic() + left
        joined.suspended = False
        joined.incarnation = incarnation
      case fx.Suspended():
        self.joined.suspended = True
      case fx.Leased(incarnation, spans):
        self.lease = incarnation, spans
      case fx.Progressed(step, progress):
        self.progress[step] = progress
      case fx.SetRequested(count):
        self.requested = count
      case Call(step):
        self.called = step
      case fx.Left():
        self.left = True
      case fx.Finished(reason):
        self.finished = reason
        self.on_finished()
      case _:
        assert_never(event)

  def wake(self) -> None:
    """Wakes up one waiting thread; other waiting threads wake up by themselves soon."""
    # The lock is already released if no thread has waited since. Not `suppress`, which
    # is slower: this is done in every step.
    try:  # noqa: SIM105
      self._changed.release()
    except RuntimeError:
      pass

  # Called by the training loop, and when a signal has come.

  def signalled(self, number: int) -> None:
    """Passes a signal on to the replica's other processes; here there are none."""

  def sync(self) -> None:
    """Applies the events so far; in a single process, they are applied already."""

  def agree(self, flag: bool) -> bool:
    """Process 0's value of the flag, if there are several processes."""
    return flag

  def close(self) -> None:
    """Marks that nothing will change any more."""

  def wait(
    self,
    ready: Callable[[], bool],
    timeout: float,
    gives_up: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Waits until `ready` or the run's end; returns whether it is ready.

    Args:
      ready: what to wait for.
      timeout: seconds to wait; time in which this process was stopped doesn't count.
      gives_up: whether to stop waiting although it is not ready; if the replica has
        several processes, process 0's answer counts.
    """
    while not (is_ready := ready()) and not self.is_over and timeout > 0:
      if gives_up():
        return False
      timeout -= self._wait_once(timeout)
    return is_ready

  @property
  def is_over(self) -> bool:
    """Whether the run has ended for this replica, by an error or not."""
    ended = self.left or self.finished is not None
    return ended or self.failure is not None

  def _wait_once(self, timeout: float) -> float:
    """Waits for a notification; returns the seconds of it without being stopped."""
    begun, longest = time.monotonic(), min(timeout, _POLL_SECONDS)
    self._changed.acquire(timeout=longest)
    return min(time.monotonic() - begun, longest)

  def answer(self, sequence: int) -> fx.Answer | None:
    """The answer to a submission, if there is one."""
    entry = self._answers.get(sequence)
    return None if entry is None else entry[0]

  def before(self, sequence: int) -> State:
    """The state before the commit that included a submission.

    After a snapshot, which skips commits, it is the snapshot's state.
    """
    return self._answers[sequence][1]

  def forget_answers(self, sequence: int) -> None:
    """Forgets the answers to submissions before this one."""
    # A copy, since the event loop may add to them meanwhile.
    for old in list(self._answers):
      if old < sequence:
        del self._answers[old]

  def forget_progress(self, steps: Sequence[int]) -> None:
    """Forgets the progress at steps that the training loop no longer needs.

    Args:
      steps: the steps of the states that the loop holds. Progress at earlier steps than
        the last of them is forgotten, but not at these steps themselves.
    """
    kept = {*steps} if self.to_save is None else {*steps, self.to_save.step}
    for step in list(self.progress):
      if step < max(steps) and step not in kept:
        del self.progress[step]
