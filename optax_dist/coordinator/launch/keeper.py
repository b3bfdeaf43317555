"""Keeps the coordinator of a job running, as long as its launcher does.

It is started again at once when it dies. One that hangs is killed first, so that
there are never two.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import tls

# Seconds without a beat after which it hangs. Only those count in which this process
# was awake itself.
_SILENCE = 5.0
_POLL_SECONDS = 0.5
# Seconds to end before it is killed.
_STOP_SECONDS = 5.0
# Seconds after which it counts as healthy, and the longest pause before a start of
# one that was not.
_HEALTHY, _LONGEST_PAUSE = 10.0, 5.0


class Listens(NamedTuple):
  """Where a coordinator listens.

  Attributes:
    bind: an address of this host; None for the one that reaches `store`.
    port: the port; None for any one, which members find in `store`.
    advertise: the host that others connect to, if it is not `bind`.
    store: a URL of etcd, where it stands by; None for one with a log in a file.
  """

  bind: str | None = None
  port: int | None = None
  advertise: str | None = None
  store: str | None = None


class Keeper:
  """The coordinator of a job, whichever process that is at the time."""

  def __init__(
    self,
    listens: Listens,
    secret: bytes,
    log: str | os.PathLike[str] | None,
    say: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    certificates: tls.Certificates | None = None,
    journal: str | None = None,
  ):
    """Starts the coordinator, and waits until it is ready.

    Args:
      listens: where it listens.
      secret: the job's secret.
      log: its log, which it continues if there is one; None for one in etcd.
      say: called with what it prints, and with what happens to it.
      env: variables to add to this process's own.
      certificates: encrypt all traffic that leaves this host.
      journal: its journal, on this host.

    Raises:
      RuntimeError: it has exited, for example because the port is taken.
      TimeoutError: it is not ready in time.
    """
    self._start: Callable[[], process.CoordinatorProcess] = lambda: (
      process.start(
        secret,
        log=log,
        journal=journal,
        beats=True,
        env=env,
        certificates=certificates,
        **listens._asdict(),
      )
    )
    self._say = say
    self._made = self._start()
    self._stops, self._drains = threading.Event(), threading.Event()
    self._drained = threading.Event()
    self._thread = threading.Thread(
      target=self._keep, name="optax-dist-keeper", daemon=True
    )
    self._thread.start()

  @property
  def pid(self) -> int:
    """The process that is the coordinator at present, or was the last."""
    return self._made.process.pid

  def drain(self) -> None:
    """Makes it end once it has no members."""
    self._drains.set()
    self._made.drain()

  def drained(self, timeout: float) -> bool:
    """Waits until it has ended after `drain`; returns whether it has."""
    return self._drained.wait(timeout)

  def stop(self) -> None:
    """Stops it; its members are notified."""
    self._stops.set()
    end = time.monotonic() + _STOP_SECONDS
    while self._thread.is_alive():
      # Again, since another one may just have started.
      late = time.monotonic() > end
      self._made.process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
      self._thread.join(_POLL_SECONDS / 5)

  def _keep(self) -> None:
    while True:
      began = time.monotonic()
      hangs = self._watch(self._made.process)
      if hangs and not self._stops.is_set():
        self._tell(
          f"process {self.pid} has not answered for {_SILENCE:g} s, and is"
          " replaced"
        )
      self._made.kill(0.0 if hangs else _STOP_SECONDS)
      for stream in (self._made.process.stdin, self._made.process.stdout):
        if stream is not None:
          with contextlib.suppress(OSError):
            stream.close()
      if self._stops.is_set():
        return
      code = self._made.process.returncode
      if self._drains.is_set() and not (code or hangs):
        self._drained.set()
        return
      if not hangs:
        ended = child.ending(self._made.process)
        self._tell(f"process {self.pid} {ended}; it starts again")
      fails = code >= 0 and time.monotonic() - began < _HEALTHY
      self._start_again(_POLL_SECONDS if fails else 0.0)

  def _start_again(self, pause: float) -> None:
    """Starts it until that succeeds."""
    told = ""
    while not self._stops.wait(pause):
      try:
        self._made = self._start()
      except (OSError, RuntimeError, TimeoutError) as error:
        if str(error) != told:
          told = str(error)
          self._tell(f"it can't start again yet: {told}")
        pause = min(_LONGEST_PAUSE, max(_POLL_SECONDS, 2 * pause))
        continue
      if self._drains.is_set():
        self._made.drain()
      return

  def _watch(self, watched: subprocess.Popen[bytes]) -> bool:
    """Passes on what it prints, until it has ended or hangs; whether it hangs."""
    assert watched.stdout is not None
    file, rest, silent = watched.stdout.fileno(), b"", 0
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while silent < _SILENCE / _POLL_SECONDS:
      if not poll.poll(1000 * _POLL_SECONDS):
        silent += 1
        continue
      more = os.read(file, 1 << 16)
      if not more:
        return False
      silent = 0
      *lines, rest = (rest + more).split(b"\n")
      for line in lines:
        if line != process.BEAT.encode():
          self._tell(line.decode(errors="replace"))
    return True

  def _tell(self, line: str) -> None:
    with contextlib.suppress(OSError):  # Nobody may read it any more.
      self._say(line)
