"""Processes that tests start, give work to, and end: both sides of them.

A worker is forked from this process, or started anew ("spawn"). Forked, it has at
once what this process has imported; but a process that has used JAX can't be
forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import connection as connections
from typing import Any, Literal

Event = dict[str, Any]
Method = Literal["fork", "spawn"]

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
# Seconds to wait at most for the stacks of a process.
_STACKS = 3.0


class Worker:
  """The view that its parent has of a process."""

  def __init__(
    self,
    name: str,
    program: Callable[..., None],
    job: Mapping[str, Any],
    log: pathlib.Path,
    *,
    method: Method = "spawn",
    host: str = "",
    **settings: Any,
  ):
    """Starts the process.

    Args:
      name: for messages.
      program: what it runs: a function of its `Channel` and the job.
      job: the keyword arguments of the program.
      log: the file for what it prints.
      method: how it is started.
      host: the network namespace that it is in; "" for this one's.
      **settings: of `jax.config`.
    """
    self.name, self._log = name, log
    context = multiprocessing.get_context(method)
    self._connection, theirs = context.Pipe()
    self._process = context.Process(
      target=_run,
      args=(program, theirs, log, host, settings, dict(job)),
      daemon=True,
    )
    self._process.start()
    theirs.close()

  @property
  def pid(self) -> int:
    """The process id, which is also that of its group."""
    assert self._process.pid is not None
    return self._process.pid

  @property
  def exit_code(self) -> int | None:
    """Its exit code, minus the signal that ended it; None while it runs."""
    return self._process.exitcode

  def fileno(self) -> int:
    """The descriptor to wait for before `read`."""
    return self._connection.fileno()

  def send(self, **message: Any) -> None:
    """Sends it a message; no effect if it has ended."""
    with contextlib.suppress(OSError):
      self._connection.send(message)

  def read(self) -> tuple[list[Event], bool]:
    """Returns what it has said by now, and whether it can say no more."""
    said = []
    try:
      while self._connection.poll():
        said.append(self._connection.recv())
    except (EOFError, OSError):
      return said, True
    return said, False

  def signal(self, number: int) -> None:
    """Sends it a signal; no effect if it has ended."""
    if self.exit_code is None:
      os.kill(self.pid, number)

  def wait(self, seconds: float) -> int | None:
    """Waits for its end; returns its exit code."""
    self._process.join(seconds)
    return self.exit_code

  def kill(self) -> bool:
    """Kills it; returns whether it has left processes, which are killed too."""
    if self._connection.closed:
      return False
    self._process.kill()
    self._process.join()
    self._connection.close()
    try:
      os.killpg(self.pid, signal.SIGKILL)
    except ProcessLookupError:
      return False
    return True

  def ending(self) -> str:
    """How it ended, and the last lines that it printed."""
    code = self.exit_code
    how = "still runs" if code is None else f"ended with exit code {code}"
    if code is not None and code < 0:
      how = f"was ended by {signal.Signals(-code).name}"
    lines = self._log.read_text(errors="replace") if self._log.exists() else ""
    return "\n".join([how, *lines.splitlines()[-100:]])

  def where(self) -> str:
    """The stacks of its threads, to show where it is."""
    before = size = self._log.stat().st_size
    self.signal(signal.SIGUSR1)
    end = time.monotonic() + _STACKS
    while time.monotonic() < end and self.exit_code is None:
      time.sleep(0.15)
      # A busy machine may not have let it begin yet, or end.
      last, size = size, self._log.stat().st_size
      if before < last == size:
        break
    with self._log.open("rb") as file:
      file.seek(before)
      return file.read().decode(errors="replace")


def wait_for_messages(workers: Iterable[Worker], seconds: float) -> set[Worker]:
  """Waits until some have said something, or ended; returns which."""
  return set(connections.wait(list(workers), seconds))


class Channel:
  """The process's own side."""

  def __init__(self, connection: connections.Connection):
    """Sets what its parent has the other end of."""
    self._connection = connection
    self._lock = threading.Lock()

  def say(self, event: str, **fields: Any) -> None:
    """Sends an event to the parent."""
    with self._lock, contextlib.suppress(OSError):
      self._connection.send({"event": event} | fields)

  def obey(self, act: Callable[[dict[str, Any]], None]) -> None:
    """Calls it for each message from now on, in a thread of its own."""
    threading.Thread(target=self._read, args=(act,), daemon=True).start()

  def _read(self, act: Callable[[dict[str, Any]], None]) -> None:
    with contextlib.suppress(OSError, EOFError):
      while True:
        act(self._connection.recv())
    os._exit(1)


def enter(host: str) -> None:
  """Moves this thread, and what it starts from now on, into a network namespace."""
  system = ctypes.CDLL(None, use_errno=True)
  with open(f"/run/netns/{host}", "rb") as file:
    if system.setns(file.fileno(), _CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"can't enter the host {host}")


def _run(
  program: Callable[..., None],
  connection: connections.Connection,
  log: pathlib.Path,
  host: str,
  settings: dict[str, Any],
  job: dict[str, Any],
) -> None:
  # A stopped process can't notice that the connection was closed.
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  parent = multiprocessing.parent_process()
  if parent is None or parent.pid != os.getppid():
    os._exit(1)
  os.setsid()  # Ctrl-C is handled by the parent.
  with log.open("ab") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  # Also works while native code holds the interpreter lock.
  faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
  if host:
    enter(host)
  import jax

  for name, value in settings.items():
    jax.config.update(name, value)
  try:
    program(Channel(connection), **job)
  except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # At a normal exit JAX would wait for other processes.
