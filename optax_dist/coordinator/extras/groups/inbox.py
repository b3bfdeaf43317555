"""Notifications for the training loops of a replica's processes, in step.

    process 0    GroupInbox: applies its events  ->  commands.Advance(call, events)
    process 1 .. GroupInbox: as many of its own  <-

The training loops of all processes see the same events at the same points of
the program: process 0 reads its events and announces how many; the others read
that many.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

from optax_dist.coordinator import errors
from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.runtime import inbox
from optax_dist.coordinator.runtime.states import State

_log = logging.getLogger("optax_dist.coordinator")


class GroupInbox(inbox.TrainingInbox):
  """An inbox that changes only at points common to all training loops."""

  def __init__(
    self,
    published: State,
    enqueue: Callable[[commands.Input], None],
    leads: bool,
    timeout: float,
    on_loss: Callable[[str], None],
  ):
    """Creates the inbox.

    Args:
      published: the first state.
      enqueue: queues an input for the core.
      leads: whether this is process 0.
      timeout: seconds that another process may take to reach the same point of
        the program.
      on_loss: called when a process of the replica is lost, with the reason.
    """
    super().__init__(published)
    self._enqueue, self._leads = enqueue, leads
    self._timeout, self._on_loss = timeout, on_loss
    self._events: collections.deque[inbox.Event] = collections.deque()
    self._advances: collections.deque[commands.Advance] = collections.deque()
    self._seen = self._calls = 0
    self._closed = False

  # Called by the event loop.

  def notify(
    self,
    event: inbox.Event
    | commands.Advance
    | commands.Signalled
    | commands.EndGroup,
  ) -> None:
    match event:
      case commands.Signalled(number):
        self.on_signal(number)
      case commands.Advance():
        self._advances.append(event)
      case commands.EndGroup(reason):
        _log.error("%s", reason)
        self.fail(errors.CoordinatorError(reason))
        self._on_loss(reason)
      case _:
        self._events.append(event)

  # Called by the training loop, and when a signal has come.

  def signalled(self, number: int) -> None:
    self._enqueue(commands.Signalled(number))

  def sync(self) -> None:
    self.agree(False)

  def agree(self, flag: bool) -> bool:
    if self._closed or self.failure is not None:
      return flag
    if not self._leads:
      return self._follow(self._timeout)
    self._announce(flag)
    return flag

  def close(self) -> None:
    self._closed = True

  def wait(
    self,
    ready: Callable[[], bool],
    timeout: float,
    gives_up: Callable[[], bool] = lambda: False,
  ) -> bool:
    ends, left = False, timeout
    goes_on = lambda: (
      bool(self._events) or self.failure is not None or gives_up()
    )
    while not (ready() or self.is_over or ends):
      if not self._leads:
        ends = self._follow(timeout + self._timeout, gives_up)
        continue
      left = self._wait_for(goes_on, left)
      if self.failure is None:
        ends = not self._events
        self._announce(ends)
    return ready()

  def _wait_for(self, ready: Callable[[], bool], timeout: float) -> float:
    """Waits for so many seconds awake at most; returns how many are left."""
    while not ready() and timeout > 0:
      timeout -= self._wait_once(timeout)
    return timeout

  def _announce(self, flag: bool) -> None:
    """Process 0 applies all events so far."""
    events = self._seen + len(self._events)
    self._enqueue(commands.Advance(self._calls, events, flag))
    self._apply(events)

  def _follow(
    self, timeout: float, look: Callable[[], bool] = lambda: False
  ) -> bool:
    """Applies as many events as process 0 did; returns its decision."""

    def ready() -> bool:
      look()  # Process 0 decides, and this process has seen a signal, too.
      return bool(self._advances) or self.failure is not None

    self._wait_for(ready, timeout)
    if self.failure is not None:
      return False
    if not self._advances:
      self.failure = errors.CoordinatorError(
        "Process 0 of the replica did not come to the same place of the program"
        f" in {timeout:.1f} s."
      )
      return False
    order = self._advances.popleft()
    if order.call != self._calls:
      self.failure = errors.CoordinatorError(
        "The processes of the replica do not make the same calls: process 0 is"
        f" at call {order.call}, this one at {self._calls}."
      )
      return False
    self._apply(order.events)
    return order.flag

  def _apply(self, events: int) -> None:
    self._calls += 1
    while self._seen < events:
      super().notify(self._events.popleft())
      self._seen += 1
      # All processes compute each state at the same point, and in this order.
      self.published.get()
