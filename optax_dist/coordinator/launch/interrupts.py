"""Signals that end a program, deferred to points where it can stop gracefully.

An exception raised by a signal handler can surface anywhere: while a lock is
being taken, or where Python drops it (a finalizer, a garbage collector
callback). A loop that polls is neither interrupted half-way nor misses a
signal.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any


class Interrupts:
  """The signals received so far.

  Attributes:
    at_once: whether a signal raises immediately; it is recorded in any case.
    number: the last signal that asked for an end; None if there was none.
  """

  def __init__(self) -> None:
    self.at_once = True
    self.number: int | None = None
    self._others: list[int] = []

  def take_other(self, number: int, frame: FrameType | None) -> None:
    """Handles signals that are only passed on."""
    self._others.append(number)

  def take_others(self) -> list[int]:
    """The signals to pass on that were received since the last call."""
    found, self._others = self._others, []
    return found

  def forget(self) -> None:
    """Forgets the signals received; `check` raises only at the next one."""
    self.number = None

  def take(self, number: int, frame: FrameType | None) -> None:
    """Handles a signal."""
    self.number = number
    if self.at_once:
      self.check()

  def check(self) -> None:
    """Raises the exception for the last signal, if there was one.

    Raises:
      KeyboardInterrupt: after SIGINT.
      SystemExit: after SIGTERM, with the exit code that shells use for it.
    """
    if self.number == signal.SIGINT:
      raise KeyboardInterrupt
    if self.number is not None:
      raise SystemExit(128 + self.number)


@contextlib.contextmanager
def handled(others: Sequence[int] = ()) -> Iterator[Interrupts]:
  """Handles SIGTERM and Ctrl-C while the block runs.

  Args:
    others: more signals, which are only recorded (`take_others`).

  If the program ignores Ctrl-C or has its own handler for it, that stays in
  place. Threads other than the main one get no signals, so nothing changes
  there.

  Example:
    >>> import os
    >>> with handled() as interrupts:
    ...   interrupts.at_once = False
    ...   os.kill(os.getpid(), signal.SIGTERM)
    ...   interrupts.check()
    Traceback (most recent call last):
      ...
    SystemExit: 143
  """
  made = Interrupts()
  if threading.current_thread() is not threading.main_thread():
    yield made
    return
  before: dict[int, Any] = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    before[signal.SIGINT] = signal.default_int_handler
  for number in before:
    signal.signal(number, made.take)
  for number in others:
    before[number] = signal.signal(number, made.take_other)
  try:
    yield made
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
