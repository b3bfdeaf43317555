"""The launched process's side of the channel to its launcher.

It is an inherited socket, on which it writes lines of JSON. It is
independent of the process's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from optax_dist.coordinator.launch.environment import (
  ProcessEnvironment,
  variable,
)

Event = dict[str, Any]

_open: dict[int, Channel] = {}


class Channel:
  """The process's side; a program that joins a run uses `current`."""

  def __init__(self, number: int):
    """Opens the socket with this file descriptor."""
    self._socket = socket.socket(fileno=number)
    # Child processes must not inherit it.
    os.set_inheritable(number, False)
    self._lock = threading.Lock()

  def say(self, event: str, **fields: Any) -> None:
    """Sends an event to the launcher; no effect if it has ended."""
    with self._lock, contextlib.suppress(OSError):
      self._socket.sendall(encode(event, fields))

  def events(self) -> Iterator[Event]:
    """Yields messages of the launcher as they arrive, until it ends."""
    with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
      for line in lines:
        yield json.loads(line)


def encode(event: str, fields: Mapping[str, Any]) -> bytes:
  """A message, as a line of JSON."""
  return json.dumps({"event": event, **fields}).encode() + b"\n"


def current() -> Channel | None:
  """The channel of this process; None if it was not started by a launcher.

  Raises:
    ValueError: a variable of the environment is invalid.

  Example:
    >>> print(current())
    None
  """
  process = os.getpid()
  if process not in _open:
    number = ProcessEnvironment.read().channel
    if number is None or not _is_socket(number):
      return None
    _open[process] = Channel(number)
  return _open[process]


@contextlib.contextmanager
def refused_by(*errors: type[Exception]) -> Iterator[None]:
  """Reports errors to the launcher that would occur again in another process."""
  try:
    yield
  except errors:
    line = current()
    if line is not None:
      line.say("refused")
    raise


def stand_by(channel: Channel) -> ProcessEnvironment:
  """Waits until this process becomes a replica; its launcher ends it otherwise.

  Until then it is in no run, and only its launcher knows it, which sends it the number
  of a replica that has died.

  Returns:
    The replica's environment, which is also set in this process.
  """
  channel.say("standby")
  for event in channel.events():
    os.environ.update(event["variables"])
    del os.environ[variable("standby")]
    return ProcessEnvironment.read()
  raise SystemExit("The launcher of this standby has ended.")


def _is_socket(number: int) -> bool:
  try:
    return stat.S_ISSOCK(os.fstat(number).st_mode)
  except OSError:
    return False
