"""A process that was launched, from both sides.

They speak in lines of JSON: the launcher reads the process's standard output
and writes to its standard input, whose end ends the process. What the process
prints otherwise goes to a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

Event = dict[str, Any]

_LAUNCHER_VARIABLE = "OPTAX_DIST_LAUNCHER"
_PR_SET_PDEATHSIG = 1


class Child:
  """A process, as its launcher sees it.

  Attributes:
    name: for messages.
    popen: the process.
    log: the file of what it prints.
  """

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    log: pathlib.Path,
    env: Mapping[str, str] | None = None,
  ):
    """Starts it.

    Args:
      name: for messages.
      command: a program that makes a `Channel` first of all.
      log: the file of what it prints; it is made.
      env: variables to add to this process's own.
    """
    self.name, self.log = name, log
    with log.open("wb") as output:
      self.popen = subprocess.Popen(
        list(command),
        env={
          **os.environ,
          **(env or {}),
          _LAUNCHER_VARIABLE: str(os.getpid()),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        start_new_session=True,  # Ctrl-C is for the launcher to handle.
      )
    assert self.popen.stdout is not None
    os.set_blocking(self.popen.stdout.fileno(), False)
    self._rest = b""

  @property
  def pid(self) -> int:
    """The process's id."""
    return self.popen.pid

  def fileno(self) -> int:
    """What to wait for, with `select`."""
    assert self.popen.stdout is not None
    return self.popen.stdout.fileno()

  def read(self) -> tuple[list[Event], bool]:
    """What it has said since, and whether it can say no more."""
    while True:
      try:
        more = os.read(self.fileno(), 1 << 16)
      except BlockingIOError:
        ended = False
        break
      if not more:
        ended = True
        break
      self._rest += more
    *lines, self._rest = self._rest.split(b"\n")
    events = []
    for line in lines:
      with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict):
          events.append(event)
    return events, ended

  def send(self, message: Mapping[str, Any]) -> None:
    """Tells it something; in vain if it has ended."""
    assert self.popen.stdin is not None
    with contextlib.suppress(OSError):
      self.popen.stdin.write(json.dumps(message).encode() + b"\n")
      self.popen.stdin.flush()

  def signal(self, number: int) -> None:
    """Sends it a signal; in vain if it has ended."""
    if self.popen.poll() is None:
      self.popen.send_signal(number)

  def kill(self) -> None:
    """Ends it at once, with all that it has started."""
    if self.popen.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.popen.pid, signal.SIGKILL)
      self.popen.wait()
    for stream in (self.popen.stdin, self.popen.stdout):
      if stream is not None:
        with contextlib.suppress(OSError):
          stream.close()

  def ending(self) -> str:
    """How it ended, in words."""
    return ending(self.popen)

  def where(self) -> str:
    """What it does now: the stack of each of its threads."""
    before = self.log.stat().st_size
    self.signal(signal.SIGUSR1)
    time.sleep(0.3)
    with self.log.open("rb") as file:
      file.seek(before)
      return file.read().decode(errors="replace")

  def tail(self, lines: int = 12) -> str:
    """The last lines that it printed."""
    try:
      text = self.log.read_text(errors="replace")
    except OSError:
      return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


class Channel:
  """The process's own side; made first of all, it ends with its launcher.

  However the launcher ends, be it by SIGKILL, the process does too.
  """

  def __init__(self) -> None:
    self._out = os.fdopen(os.dup(1), "w")
    # Prints are not for the launcher.
    os.dup2(2, 1)
    self._lock = threading.Lock()
    self._received: queue.Queue[Event] = queue.Queue()
    # Works while native code holds the interpreter, too.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_launcher()
    threading.Thread(target=self._read, name="launcher", daemon=True).start()

  def say(self, event: str, **fields: Any) -> None:
    """Tells the launcher something."""
    line = json.dumps({"event": event} | fields)
    with self._lock:
      self._out.write(line + "\n")
      self._out.flush()

  def receive(self, timeout: float | None = None) -> Event:
    """Waits for what the launcher says.

    Raises:
      TimeoutError: nothing came in time.
    """
    try:
      return self._received.get(timeout=timeout)
    except queue.Empty:
      raise TimeoutError(f"The launcher said nothing in {timeout} s.") from None

  def _read(self) -> None:
    rest = b""
    while more := os.read(sys.stdin.fileno(), 4096):
      *lines, rest = (rest + more).split(b"\n")
      for line in lines:
        self._received.put(json.loads(line))
    os._exit(1)


def _end_with_launcher() -> None:
  # A process that is stopped can't notice that its standard input has ended.
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  launcher = os.environ.get(_LAUNCHER_VARIABLE)
  if launcher is not None and int(launcher) != os.getppid():
    os._exit(1)


def ending(process: subprocess.Popen) -> str:
  """How a process ended, in words."""
  code = process.poll()
  if code is None:
    return "still runs"
  if code < 0:
    with contextlib.suppress(ValueError):
      return f"was ended by {signal.Signals(-code).name}"
  return f"ended with exit code {code}"
