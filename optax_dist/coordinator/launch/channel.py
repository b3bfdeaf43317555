"""The launched process's side of the channel to its launcher.

It is an inherited socket, on which both sides write lines of JSON. It is
independent of the process's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from typing import Any

from optax_dist.coordinator.launch.environment import Environment, variable

Event = dict[str, Any]

_open: dict[int, Channel] = {}


class Channel:
  """The process's side; a program that joins a run uses `current`."""

  def __init__(self) -> None:
    """Opens the socket that the environment names.

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
    _open[os.getpid()] = self

  def say(self, event: str, **fields: Any) -> None:
    """Sends an event to the launcher; no effect if it has ended."""
    line = json.dumps({"event": event} | fields).encode() + b"\n"
    with self._lock, contextlib.suppress(OSError):
      self._socket.sendall(line)


def current() -> Channel | None:
  """The channel of this process; None if it was not started by a launcher.

  Example:
    >>> print(current())
    None
  """
  found = _open.get(os.getpid())
  if found is None:
    with contextlib.suppress(ValueError):
      found = Channel()
  return found


def _is_socket(number: int) -> bool:
  try:
    return stat.S_ISSOCK(os.fstat(number).st_mode)
  except OSError:
    return False
