"""SIGTERM as a graceful leave: the gradient in progress still counts.

Schedulers send SIGTERM and, some seconds later, SIGKILL. On SIGTERM a replica
finishes its step and leaves the run, and its training loop sees
`Outcome.finished`. If all replicas are to save first, it asks them to, and
leaves after the common step. While the program does not call `step`, as in an
evaluation or a warm-up, it can ask whether there was a signal; if it does not ask, a
thread prints a warning.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from optax_dist._internal import checks
from optax_dist.coordinator.runtime import process_exit

MODES = ("leave", "save")
DEFAULT_GRACE = 10.0
# How many calls of the program's stack the warning shows.
_CALLS = 8
# Shares of the grace period after which a replica waits for no step, and after which
# it does not wait for its coordinator either: the rest is for the program.
NO_STEP, LEAVES_ALONE = 0.5, 0.75


class Late(Exception):
  """Too much of the grace period is over: the replica stops waiting and leaves."""


class Preemption:
  """How a replica reacts to SIGTERM.

  Attributes:
    received: whether the signal was received.
    tell: called with the signal's number once a member has received it.
  """

  def __init__(
    self,
    mode: str,
    grace: float | None = None,
    *,
    interrupts: bool = False,
  ):
    """Configures the reaction.

    Args:
      mode: "leave", or "save" to have all replicas save first.
      grace: seconds until the process is killed; the replica leaves after half
        of them in any case.
      interrupts: whether SIGINT (Ctrl-C) is handled as well.

    Raises:
      ValueError: there is no such mode.
    """
    checks.one_of("on_sigterm", mode, MODES)
    self._mode = mode
    self._grace = DEFAULT_GRACE if grace is None else grace
    self._since: float | None = None
    self._number = 0
    self._asked = False
    self._saved = False
    self._numbers = [signal.SIGTERM, *([signal.SIGINT] if interrupts else [])]
    self._before: dict[int, Any] = {}
    self._joined = False
    self.tell: Callable[[int], None] = lambda number: None
    self._process = os.getpid()
    # For the watching thread: whether a signal came to this process or to another one
    # of its replica; None to end. A `SimpleQueue`, since its `put` is safe in a signal
    # handler that interrupts another `put`.
    self._news: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
    self._removed = threading.Event()
    self._seen = False

  @property
  def received(self) -> bool:
    return self._since is not None

  def install(self) -> None:
    """Installs the signal handlers.

    It does nothing outside the main thread, and keeps the program's own handlers.
    """
    if threading.current_thread() is not threading.main_thread():
      return
    for number in self._numbers:
      if signal.getsignal(number) in (
        signal.SIG_DFL,
        signal.default_int_handler,
      ):
        self._before[number] = signal.signal(number, self._on_signal)
    if self._before:
      self._news, self._removed = queue.SimpleQueue(), threading.Event()
      threading.Thread(
        target=self._watch, name="optax-dist-preemption", daemon=True
      ).start()

  def remove(self) -> None:
    """Removes the signal handlers."""
    for number, before in self._before.items():
      # A bound method is a new object each time, so compare with "==".
      if signal.getsignal(number) == self._on_signal:
        signal.signal(number, before)
    self._before = {}
    self._removed.set()
    self._news.put(None)

  def joined(self) -> None:
    """The replica is a member: from now on it leaves after a step."""
    self._joined = True

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    if os.getpid() != self._process:
      # A forked child, such as a data loader's worker, has no run to leave.
      signal.signal(number, self._before.get(number, signal.SIG_DFL))
      os.kill(os.getpid(), number)
      return
    # A member only notes the signal here, since it may interrupt any code.
    self.receive(number, own=True)
    if not self._joined:
      self.check()

  def receive(self, number: int, own: bool = False) -> None:
    """A signal has come: to this process, or to another one of its replica."""
    if self._since is None:
      self._since, self._number = time.monotonic(), number
      self._news.put(own)

  def look(self) -> bool:
    """Whether a signal has come; if so, the program now knows, and gets no warning."""
    self._seen = self._seen or self.received
    return self.received

  def is_late(self, share: float) -> bool:
    """Whether this share of the grace period is over since a signal."""
    since = self._since
    return since is not None and time.monotonic() - since > share * self._grace

  def _watch(self) -> None:
    """Warns, before the process is killed, that the program has not seen the signal."""
    wait, own = NO_STEP * self._grace, self._news.get()
    if own is None:
      return
    if own and self._joined:
      self.tell(self._number)
    if self._removed.wait(wait) or self._seen:
      return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.format_stack(frame)[-_CALLS:] if frame else []
    process_exit.say(
      f"{signal.Signals(self._number).name} came {wait:g} s ago, and this program"
      " has neither come to the end of a step nor looked at replica.preempted: it"
      f" will be killed {self._grace - wait:g} s from now. Look at"
      " replica.preempted in loops without replica.step, such as an evaluation, and"
      " end them if it is true."
      f" The program is here:\n{''.join(calls)}"
    )

  def check(self) -> None:
    """Ends a program that got the signal before it is a member.

    Called again after the handler, because Python drops exceptions in some places, such
    as in JAX's callback of the garbage collector.

    Raises:
      SystemExit: it got the signal; it has nothing to finish, and might wait for long.
    """
    if self._since is not None:
      raise SystemExit(128 + self._number)

  def wants_save(self) -> bool:
    """Whether all replicas are to be asked to save now; True once."""
    if not self.received or self._mode != "save" or self._asked:
      return False
    self._asked = True
    return True

  def is_time(self, *, save: bool, settled: bool) -> bool:
    """Whether to leave after a step.

    Args:
      save: whether it was the common step to save at.
      settled: whether the replica has submitted all that it has computed.
    """
    if self._since is None:
      return False
    if self.is_late(NO_STEP):
      return not save  # The program saves first.
    if self._mode == "save" and not self._saved:
      # The replica takes one more step after the one at which its program saves.
      self._saved = save
      return False
    return settled
