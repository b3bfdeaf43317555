"""Noticing at once that another process of this host has ended (Linux)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import threading
from collections.abc import Callable

from optax_dist.coordinator import engine

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Process:
  """A process of this host.

  Attributes:
    pid: its number.
    started: its start time in clock ticks: numbers are used again.
  """

  pid: int
  started: int


def this_process() -> Process:
  """The process that calls."""
  return Process(os.getpid(), _start_time(os.getpid()))


def open_process(process: Process) -> int:
  """A descriptor that stands for the process, and for no later one.

  Raises:
    engine.PeerLost: it has ended.
  """
  try:
    file = os.pidfd_open(process.pid)
  except OSError as error:
    raise engine.PeerLost(f"Process {process.pid} has ended.") from error
  try:
    if _start_time(process.pid) == process.started and not has_ended(file):
      return file
  except OSError:
    pass
  os.close(file)
  raise engine.PeerLost(f"Process {process.pid} has ended.")


def has_ended(file: int) -> bool:
  """Whether the process of the descriptor has ended."""
  poll = select.poll()
  poll.register(file, select.POLLIN)
  return bool(poll.poll(0))


class ProcessWatch:
  """One thread that waits for the end of many processes."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._lost: dict[int, Callable[[], None]] = {}  # By descriptor.
    self._epoll: select.epoll | None = None
    self._wake = -1
    self._closed = False

  def add(
    self, process: Process, lost: Callable[[], None]
  ) -> Callable[[], None]:
    """Calls `lost` when the process ends; returns what ends the watch."""
    try:
      file = open_process(process)
    except engine.PeerLost:
      thread = threading.Thread(target=lost, daemon=True)
      thread.start()
      return lambda: None
    with self._lock:
      if self._closed:
        os.close(file)
        raise engine.PeerLost("The exchange has been closed.")
      if self._epoll is None:
        self._start()
      assert self._epoll is not None
      self._lost[file] = lost
      self._epoll.register(file, select.EPOLLIN | select.EPOLLONESHOT)

    def forget() -> None:
      self._forget(file, lost)

    return forget

  def count(self) -> int:
    """How many processes are watched."""
    with self._lock:
      return len(self._lost)

  def close(self) -> None:
    """Ends all watches."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      files = list(self._lost)
      self._lost.clear()
      if self._epoll is not None:
        os.eventfd_write(self._wake, 1)
    for file in files:
      os.close(file)

  def _start(self) -> None:
    self._wake = os.eventfd(0, os.EFD_CLOEXEC)
    self._epoll = select.epoll()
    self._epoll.register(self._wake, select.EPOLLIN)
    threading.Thread(
      target=self._run, name="process-watch", daemon=True
    ).start()

  def _run(self) -> None:
    assert self._epoll is not None
    while True:
      for file, _ in self._epoll.poll():
        with self._lock:
          if self._closed:
            self._epoll.close()
            os.close(self._wake)
            return
          lost = self._lost.get(file)
        # A descriptor may have been closed, and its number used again.
        if lost and has_ended(file) and self._forget(file, lost):
          try:
            lost()
          except Exception:
            _logger.exception("What was to be called as a peer ended failed.")

  def _forget(self, file: int, lost: Callable[[], None]) -> bool:
    with self._lock:
      if self._lost.get(file) is not lost:
        return False
      del self._lost[file]
      assert self._epoll is not None
      with contextlib.suppress(OSError):
        self._epoll.unregister(file)
      os.close(file)
    return True


def _start_time(pid: int) -> int:
  with open(f"/proc/{pid}/stat") as file:
    # The name of the program, in brackets, may hold anything.
    return int(file.read().rpartition(")")[2].split()[19])
