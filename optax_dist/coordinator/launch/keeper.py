"""Keeps the coordinator of a job running, as long as its launcher does.

It is started again at once when it dies. One that hangs is killed first, so that
there are never two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.server import process
from optax_dist.coordinator.server.process import CoordinatorProcess, Settings

# Seconds without a beat after which it hangs. Only those count in which this process
# was awake itself.
_SILENCE, _LONGEST_LOOK = 5.0, 0.5
# Seconds after which it counts as healthy, and the shortest and longest pause before a
# start of one that was not.
_HEALTHY, _SHORTEST, _LONGEST = 10.0, 0.5, 5.0
# Seconds to end once it prints no more.
_STOP_SECONDS = 5.0


class Keeper:
  """The coordinator of a job, whichever process that is at the time.

  Attributes:
    drained: whether it has ended after `drain`.
  """

  def __init__(
    self,
    settings: Settings,
    environment: Environment,
    say: Callable[[str], None],
    env: Mapping[str, str],
  ):
    """Starts the coordinator, and waits until it is ready.

    Args:
      settings: where it listens, and its log.
      environment: that of all replicas.
      say: called with what it prints, and with what happens to it.
      env: variables to add to this process's own.

    Raises:
      RuntimeError: it has exited, for example because the port is taken.
      TimeoutError: it is not ready in time.
    """
    assert environment.secret is not None
    secret = environment.secret.encode()
    settings = msgspec.structs.replace(
      settings,
      journal=environment.journal,
      certificates=environment.find_certificates(),
      lifeline=True,
      beats=True,
    )
    self._start = lambda: CoordinatorProcess(
      settings, secret, environment.store, env
    )
    self._say, self.drained = say, False
    self._drains = False
    # When the next one starts; None while there is one.
    self._due: float | None = None
    self._pause = 0.0
    self._begin(waits=True)

  def _begin(self, waits: bool = False) -> None:
    self._current = self._start()
    if waits:
      self._current.wait_until_ready()
    os.set_blocking(self.file, False)
    self._began = self._looked = time.monotonic()
    self._silent, self._rest = 0.0, b""

  @property
  def file(self) -> int:
    """The descriptor that it prints to; -1 while there is none."""
    stdout = self._current.process.stdout
    return -1 if stdout is None or stdout.closed else stdout.fileno()

  def poll(self) -> None:
    """Passes on what it prints, and starts it again if it has ended or hangs."""
    now = time.monotonic()
    if self._due is not None:
      if now >= self._due:
        self._start_again(now)
      return
    self._silent += min(now - self._looked, _LONGEST_LOOK)
    self._looked = now
    ended = not self._read()
    hangs = self._silent >= _SILENCE
    if self.drained or not (ended or hangs):
      return
    made = self._current.process
    self._current.kill(0.0 if hangs else _STOP_SECONDS)
    self._close()
    if self._drains and not (made.returncode or hangs):
      self.drained = True
      return
    if hangs:
      how = f"has not answered for {_SILENCE:g} s, and is replaced"
    else:
      how = f"{child.ending(made)}; it starts again"
    if not self._pause:  # Of one that can't start, nobody need hear again.
      self._say(f"process {made.pid} {how}")
    fails = not hangs and made.returncode >= 0 and now - self._began < _HEALTHY
    self._pause = (
      min(_LONGEST, max(_SHORTEST, 2 * self._pause)) if fails else 0.0
    )
    self._due = now + self._pause

  def _start_again(self, now: float) -> None:
    try:
      self._begin()
    except OSError as error:  # Out of processes or memory.
      self._say(f"it can't start again yet: {error}")
      self._due = now + _LONGEST
      return
    self._due = None
    if self._drains:
      self._current.drain()

  def drain(self) -> None:
    """Makes it end once it has no members."""
    self._drains = True
    self._current.drain()

  def stop(self) -> None:
    """Stops it; its members are notified."""
    if self._due is None and not self.drained:
      self._current.stop()
      self._read()
      self._close()

  def _close(self) -> None:
    assert self._current.process.stdout is not None
    self._current.process.stdout.close()

  def _read(self) -> bool:
    """Passes on what it has printed; returns whether it may print more."""
    while True:
      try:
        more = os.read(self.file, 1 << 16)
      except BlockingIOError:
        return True
      if not more:
        return False
      self._silent = 0.0
      *lines, self._rest = (self._rest + more).split(b"\n")
      for line in lines:
        text = line.decode(errors="replace")
        if text != process.BEAT and not text.startswith(process.READY):
          self._say(text)
