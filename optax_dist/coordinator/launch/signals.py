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

# Those that ask a program to end; the last one if its terminal is closed.
ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_OTHERS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def recorded() -> Iterator[list[int]]:
  """Records SIGTERM, SIGHUP, Ctrl-C, SIGUSR1 and SIGUSR2 while the block runs.

  If the program ignores Ctrl-C or SIGHUP (nohup) or has its own handler for it,
  that stays in place. How child processes end is known meanwhile, also where whoever
  has started the program ignores that (SIGCHLD). Threads other than the main one get
  no signals, so nothing changes there.

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
