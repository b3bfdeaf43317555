"""The launched process's side of the channel to its launcher.

It is an inherited socket, on which both sides write lines of JSON. It is
independent of the process's output.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import signal
import socket
import stat
import threading
from typing import Any

from optax_dist.coordinator.launch.environment import Environment, variable

Event = dict[str, Any]

LAUNCHER_VARIABLE = variable("launcher")
_PR_SET_PDEATHSIG = 1

_open: dict[int, Channel] = {}


class Channel:
  """The process's side; a program that joins a run uses `current`.

  Once created, it ends the process with its launcher, even after a SIGKILL.
  """

  def __init__(self, *, ends_with_launcher: bool = True) -> None:
    """Opens the socket that the environment names.

    Args:
      ends_with_launcher: whether this process ends as soon as its launcher
        does, even if the launcher can't clean up.

    Raises:
      ValueError: this process was not launched.
    """
    number = Environment.read().channel
    if number is None or not _is_socket(number):
      raise ValueError(
        "No launcher has started this process: there is no"
        f" {variable('channel')} in its environment."
      )
    self._socket = socket.socket(fileno=number)
    # Child processes must not inherit it.
    os.set_inheritable(number, False)
    self._lock = threading.Lock()
    self._received: queue.Queue[Event] = queue.Queue()
    _open[os.getpid()] = self
    if ends_with_launcher:
      # Also works while native code holds the interpreter lock.
      faulthandler.register(signal.SIGUSR1, all_threads=True)
      _end_with_launcher()
      threading.Thread(target=self._read, name="launcher", daemon=True).start()

  def say(self, event: str, **fields: Any) -> None:
    """Sends an event to the launcher; no effect if it has ended."""
    line = json.dumps({"event": event} | fields).encode() + b"\n"
    with self._lock, contextlib.suppress(OSError):
      self._socket.sendall(line)

  def receive(self, timeout: float | None = None) -> Event:
    """Waits for a message from the launcher.

    Raises:
      TimeoutError: nothing came in time.
    """
    try:
      return self._received.get(timeout=timeout)
    except queue.Empty:
      raise TimeoutError(f"The launcher said nothing in {timeout} s.") from None

  def _read(self) -> None:
    rest = b""
    with contextlib.suppress(OSError):
      while more := self._socket.recv(4096):
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
          self._received.put(json.loads(line))
    os._exit(1)


def current() -> Channel | None:
  """The channel of this process; None if it was not started by a launcher.

  Example:
    >>> print(current())
    None
  """
  found = _open.get(os.getpid())
  if found is None:
    with contextlib.suppress(ValueError):
      found = Channel(ends_with_launcher=False)
  return found


def _is_socket(number: int) -> bool:
  try:
    return stat.S_ISSOCK(os.fstat(number).st_mode)
  except OSError:
    return False


def _end_with_launcher() -> None:
  # A stopped process can't notice that its socket was closed.
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  launcher = os.environ.get(LAUNCHER_VARIABLE)
  if launcher is not None and int(launcher) != os.getppid():
    os._exit(1)
