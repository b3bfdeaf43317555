"""Signals that are recorded, for a loop that polls.

An exception raised by a signal handler can surface anywhere: while a lock is
being taken, or where Python drops it (a finalizer, a garbage collector
callback). A loop that polls is neither interrupted half-way nor misses a
signal.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

# Signals that ask a program to end; SIGHUP when its terminal is closed.
ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_OTHERS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def recorded() -> Iterator[list[int]]:
  """Records SIGTERM, SIGHUP, Ctrl-C, SIGUSR1 and SIGUSR2 while the block runs.

  If the program ignores Ctrl-C or SIGHUP (nohup) or has its own handler for it,
  that stays in place. Inside the block, SIGCHLD is not ignored, as it may be by the
  parent of this process, so that exit codes of child processes are known. Threads other
  than the main one get no signals, so nothing changes there.

  Yields:
    The numbers of the signals so far, in order.

  Example:
    >>> import os
    >>> with recorded() as numbers:
    ...   os.kill(os.getpid(), signal.SIGTERM)
    ...   numbers
    [15]
  """
  numbers: list[int] = []
  if threading.current_thread() is not threading.main_thread():
    yield numbers
    return
  recorded = (*ENDING, *_OTHERS)
  before = {
    number: signal.getsignal(number) for number in (*recorded, signal.SIGCHLD)
  }
  for number in (signal.SIGINT, signal.SIGHUP):
    if before[number] not in (signal.default_int_handler, signal.SIG_DFL):
      del before[number]
  for number in before.keys() & recorded:
    signal.signal(number, lambda number, frame: numbers.append(number))
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  try:
    yield numbers
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
