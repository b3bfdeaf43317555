"""Printing that never blocks, for a process that is about to end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Seconds to wait until the text is printed.
_PRINT_SECONDS = 1.0
# Exit code of a process that ends itself: the launcher restarts its replica.
EXIT_CODE = 75


def say(text: str) -> None:
  """Prints a text to standard error, in a thread of its own.

  Standard error may be a pipe that is full, closed, or read by no process.

  Args:
    text: the text; it is lost if it can't be printed.
  """

  def write() -> None:
    with contextlib.suppress(OSError, ValueError):
      print(text, file=sys.stderr, flush=True)

  thread = threading.Thread(target=write, name="optax-dist-exit", daemon=True)
  with contextlib.suppress(RuntimeError):  # No more threads can be started.
    thread.start()
    thread.join(_PRINT_SECONDS)


def end_process(text: str) -> None:
  """Ends this process without cleaning up; the launcher restarts its replica.

  Args:
    text: why, for the standard error stream.
  """
  say(text)
  os._exit(EXIT_CODE)
