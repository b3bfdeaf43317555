"""Signals that end a program, handled where a program can stop gracefully.

What a signal's handler raises can come up anywhere: in the midst of taking a
lock, or where Python drops it (a finalizer, a callback of the garbage
collector). A loop that asks now and then is neither left half-way nor missed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any


class Interrupts:
  """What came so far.

  Attributes:
    at_once: whether a signal raises where it comes; it is remembered in any
      case.
    number: the last signal that asks for an end; None if there was none.
  """

  def __init__(self) -> None:
    self.at_once = True
    self.number: int | None = None
    self._others: list[int] = []

  def take_other(self, number: int, frame: FrameType | None) -> None:
    """A handler of signals that are only passed on."""
    self._others.append(number)

  def take_others(self) -> list[int]:
    """The signals to pass on that came since the last call."""
    found, self._others = self._others, []
    return found

  def forget(self) -> None:
    """Has `check` raise at the next signal only."""
    self.number = None

  def take(self, number: int, frame: FrameType | None) -> None:
    """A handler of signals."""
    self.number = number
    if self.at_once:
      self.check()

  def check(self) -> None:
    """Raises what the signal asks for, if there was one.

    Raises:
      KeyboardInterrupt: after SIGINT.
      SystemExit: after SIGTERM, with the code that shells use for it.
    """
    if self.number == signal.SIGINT:
      raise KeyboardInterrupt
    if self.number is not None:
      raise SystemExit(128 + self.number)


@contextlib.contextmanager
def handled(others: Sequence[int] = ()) -> Iterator[Interrupts]:
  """Takes SIGTERM and Ctrl-C while the block runs.

  Args:
    others: more signals, which are only collected (`take_others`).

  A Ctrl-C that the program ignores, or has a handler of its own for, is left to
  it; so is everything in threads other than the main one, which get no signals.

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
