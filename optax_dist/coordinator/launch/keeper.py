"""Keeps the coordinator of a job running, as long as its launcher does.

It is started again at once when it dies. One that hangs is killed first, so that
there are never two. With one in etcd, each host has a standby.
"""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping

import msgspec

from optax_dist.coordinator.launch import child, output
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.server import log as server_log
from optax_dist.coordinator.server import process
from optax_dist.coordinator.server.process import CoordinatorProcess, Settings
from optax_dist.coordinator.transport import addresses

# Seconds without a beat after which it hangs. Only those count in which this process
# was awake itself.
_SILENCE, _LONGEST_LOOK = 5.0, 0.5
# Seconds after which it counts as healthy, and the shortest and longest pause before a
# start of one that was not.
_HEALTHY, _SHORTEST, _LONGEST = 10.0, 0.5, 5.0
# Seconds to end once it prints no more.
_STOP_SECONDS = 5.0
# Seconds between two looks, and after a signal in which it goes on for other hosts.
_POLL_SECONDS, _FAREWELL = 0.1, 3.0


class Keeper:
  """The coordinator of a job, whichever process that is at the time.

  Attributes:
    address: where members find it, which may be on another host.
  """

  def __init__(
    self,
    placement: Placement,
    environment: Environment,
    *,
    folder: pathlib.Path | None,
    log: pathlib.Path | None,
    continues: bool,
    env: Mapping[str, str],
    echo: output.Echo,
  ):
    """Starts the coordinator if it belongs here, and waits until it is ready.

    Args:
      placement: what runs on this host.
      environment: that of all replicas.
      folder: see `Launcher`.
      log: see `Launcher`.
      continues: see `Launcher`.
      env: variables to add to this process's own.
      echo: called with each line of its output.

    Raises:
      RuntimeError: it has exited, for example because the port is taken.
      TimeoutError: it is not ready in time.
      LogError: its log can't be continued.
    """
    assert environment.secret is not None
    secret = environment.secret.encode()
    self._is_alone = placement.node.count == 1
    self._drains, self._pause = False, 0.0
    # The present one; None between two, and where there is none. When the next one
    # starts; infinite for never.
    self._current: CoordinatorProcess | None = None
    self._due = math.inf
    settings = _settings(placement, environment, log, continues)
    self.address = environment.store or placement.node.address or ""
    if settings is None:
      return
    self.address = self.address or f"{settings.bind}:{settings.port}"
    self._start = lambda: CoordinatorProcess(
      settings, secret, environment.store, env
    )
    self._printed = output.OutputRelay("coordinator", folder=folder, echo=echo)
    made = self._begin()
    try:
      made.wait_until_ready()
    except process.PortTaken as error:
      raise RuntimeError(
        f"{error} Most likely another launcher has --node-rank 0 of this job,"
        " or another job has this --address."
      ) from None
    finally:
      if not made.address:
        self._printed.end()
    os.set_blocking(self.files[0], False)

  def _begin(self) -> CoordinatorProcess:
    self._current = self._start()
    self._due = math.inf
    self._began = self._looked = time.monotonic()
    self._silent, self._rest = 0.0, b""
    return self._current

  @property
  def files(self) -> list[int]:
    """Descriptors to wait for: what it prints to."""
    stdout = self._current and self._current.process.stdout
    return [stdout.fileno()] if stdout else []

  def poll(self) -> None:
    """Passes on what it prints, and starts it again if it has ended or hangs."""
    now = time.monotonic()
    if self._current is None:
      if now >= self._due:
        self._start_again(now)
      return
    self._silent += min(now - self._looked, _LONGEST_LOOK)
    self._looked = now
    ended = not self._read()
    hangs = self._silent >= _SILENCE
    if not (ended or hangs):
      return
    made = self._current.process
    self._current.kill(0.0 if hangs else _STOP_SECONDS)
    self._forget()
    if self._drains and not (made.returncode or hangs):
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
      made = self._begin()
    except OSError as error:  # Out of processes or memory.
      self._say(f"it can't start again yet: {error}")
      self._due = now + _LONGEST
      return
    os.set_blocking(self.files[0], False)
    if self._drains:
      made.drain()

  def linger(
    self, stops: Callable[[], bool], say: Callable[[str], None]
  ) -> None:
    """Keeps it as long as replicas on other hosts need it.

    Args:
      stops: whether it is to end soon in any case.
      say: called with what people must know.
    """
    if self._is_alone:
      return
    self._drains = True
    if self._current is not None:
      self._current.drain()
    began, said = time.monotonic(), False
    while self._current is not None or self._due < math.inf:
      self.poll()
      time.sleep(_POLL_SECONDS)
      late = time.monotonic() - began > _FAREWELL
      if late and stops():
        return
      if late and not said:
        said = True
        say(
          "its replicas have ended; it coordinates those of other hosts until they"
          " have, too"
        )

  def stop(self) -> None:
    """Stops it; its members are notified."""
    if self._current is not None:
      self._current.stop()
      self._read()
      self._forget()
      self._printed.end()

  def _forget(self) -> None:
    assert self._current is not None
    assert self._current.process.stdout is not None
    self._current.process.stdout.close()
    self._current = None

  def _say(self, text: str) -> None:
    self._printed.take(f"{text}\n".encode(), True)

  def _read(self) -> bool:
    """Passes on what it has printed; returns whether it may print more."""
    while True:
      try:
        more = os.read(self.files[0], 1 << 16)
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


def _settings(
  placement: Placement,
  environment: Environment,
  log: pathlib.Path | None,
  continues: bool,
) -> Settings | None:
  """How this launcher starts the coordinator; None if it starts none."""
  node = placement.node
  if environment.store is not None:
    settings = Settings(bind=environment.local_addr)
  elif placement.external or node.rank:
    return None
  else:
    where = node.address or f"127.0.0.1:{addresses.free_ports()[0]}"
    settings = Settings.at(where)
    assert settings.port is not None
    log = log or process.default_log(settings.port)
    if not (continues and server_log.goes_on(log, placement.replicas)):
      server_log.forget(log)
    settings = msgspec.structs.replace(settings, log=str(log))
  return msgspec.structs.replace(
    settings,
    journal=environment.journal,
    certificates=environment.find_certificates(),
    lifeline=True,
    beats=True,
  )
