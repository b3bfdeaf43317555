"""A launched process whose output goes to a file, read by a thread."""

import contextlib
import json
import os
import pathlib
import selectors
import signal
import sys
import threading
import time

import worker_channel

from optax_dist.coordinator.launch import child, output

# Seconds to wait at most for the stacks of a process.
_STACKS = 3.0


class LoggedChild(child.Child):
  """A process that is looked at only now and then."""

  def __init__(self, name, command, log, env=None):
    self._log = pathlib.Path(log)
    printed = output.Printed(name, file=log, echo=lambda *told: None)
    variables = {
      worker_channel.PARENT_VARIABLE: str(os.getpid()),
      "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    super().__init__(name, command, printed, variables | (env or {}))
    self._stop = threading.Event()
    self._reader = threading.Thread(target=self._follow, daemon=True)
    self._reader.start()

  def send(self, message):
    """Sends it a message; no effect if it has ended."""
    with contextlib.suppress(OSError):
      self._socket.sendall(json.dumps(message).encode() + b"\n")

  def kill(self):
    """Kills it, and completes the file."""
    self._stop.set()
    self._reader.join()
    super().kill()

  def where(self):
    """The stacks of its threads, to show where it is."""
    before = size = self._log.stat().st_size
    self.signal(signal.SIGUSR1)
    end = time.monotonic() + _STACKS
    while time.monotonic() < end and not self.has_ended():
      time.sleep(0.15)
      # A busy machine may not have let it begin yet, or end.
      last, size = size, self._log.stat().st_size
      if before < last == size:
        break
    with self._log.open("rb") as file:
      file.seek(before)
      return file.read().decode(errors="replace")

  def _follow(self):
    while not self._stop.is_set() and (streams := self._streams()):
      with selectors.PollSelector() as selector:
        for stream in streams:
          selector.register(stream, selectors.EVENT_READ)
        if selector.select(0.05):
          self.read_prints()


def wait_for_messages(children, seconds):
  """Waits until processes have said something or closed their channels.

  Args:
    children: the processes to wait for; none of their channels has ended.
    seconds: how long to wait at most.

  Returns:
    Those that `read` finds something of.
  """
  # `select.select` refuses descriptors from 1024 on.
  with selectors.PollSelector() as selector:
    for one in children:
      selector.register(one, selectors.EVENT_READ, one)
    return [key.data for key, _ in selector.select(seconds)]


def read_members(members, seconds):
  """Reads what the processes of members have said.

  Args:
    members: what has a `process` each, whose channel has not ended.
    seconds: how long to wait for something, at most.

  Yields:
    A member, its events, and whether its channel has ended.
  """
  ready = wait_for_messages([m.process for m in members], seconds)
  for member in members:
    if member.process in ready:
      yield member, *member.process.read()
