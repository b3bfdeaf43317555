"""Keeps the coordinator of a job running, as long as its launcher does.

It is started again at once when it dies. One that hangs is killed first, so that
there are never two. With one in etcd, each host has a standby.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.launch.child import Child
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.server import log as server_log
from optax_dist.coordinator.server import process
from optax_dist.coordinator.server.process import Settings
from optax_dist.coordinator.transport import addresses

# Seconds without a beat after which the coordinator counts as hung; and the most
# seconds between two polls that count, as this process may have been stopped itself.
_SILENCE, _LONGEST_LOOK = 5.0, 0.5
# Seconds after which a coordinator counts as healthy, and seconds to pause before the
# next start if it ended earlier.
_HEALTHY, _PAUSE = 10.0, 2.0
# Seconds that the coordinator has to end by itself.
_STOP_SECONDS = 5.0
# Seconds between two polls, while it starts and later; and seconds for which it goes on
# after a signal, for replicas of other hosts.
_READY_SECONDS, _POLL_SECONDS, _FAREWELL = 0.01, 0.1, 3.0


class Log(NamedTuple):
  """The log of a coordinator.

  Attributes:
    path: where it is; None for a file in the folder of temporary files.
    continues: whether an earlier run goes on, if it can: its replicas may live on
      other hosts.
  """

  path: pathlib.Path | None = None
  continues: bool = False


class Keeper:
  """The coordinator of a job, whichever process that is at the time.

  Attributes:
    address: where members find it, which may be on another host.
  """

  def __init__(
    self,
    settings: Settings | None,
    placement: Placement,
    environment: Environment,
    setup: child.Setup,
  ):
    """Starts the coordinator if it belongs here.

    Args:
      settings: see `settings_of`.
      placement: what runs on this host.
      environment: the environment of all replicas.
      setup: how it is started.

    Raises:
      OSError: it can't be started.
    """
    assert environment.secret is not None
    self._is_alone = placement.hosts == 1
    self._is_ready = self._drains = self._fails = False
    self._last_line = ""
    # The present one; None between two, and where there is none. When the next one
    # starts; infinite for never.
    self._child: Child | None = None
    self._due = math.inf
    self._echo = setup.echo
    self.address = environment.store or placement.address or ""
    if settings is None:
      return
    self.address = self.address or f"{settings.bind}:{settings.port}"
    secret = environment.secret.encode()
    setup = dataclasses.replace(setup, echo=self._pass_on)
    self._start = lambda: setup.start(
      "coordinator",
      process.command(settings),
      process.variables(secret, environment.store),
    )
    self._begin(time.monotonic())

  def _begin(self, now: float) -> None:
    self._due, self._began, self._looked, self._silent = math.inf, now, now, 0.0
    self._child, self._knows_drain = self._start(), False

  def wait(self, check: Callable[[], None]) -> None:
    """Waits until the coordinator is ready.

    Args:
      check: called meanwhile; may raise.

    Raises:
      RuntimeError: it has exited, for example because the port is taken.
      TimeoutError: it is not ready in time.
    """
    while self._child is not None and not self._is_ready:
      check()
      time.sleep(_READY_SECONDS)
      self.poll()

  @property
  def files(self) -> list[int]:
    """Descriptors to wait for: its messages and output."""
    return [] if self._child is None else self._child.files()

  def poll(self) -> None:
    """Passes on the coordinator's output; starts it again if it has ended or hangs.

    Raises:
      RuntimeError, TimeoutError: the first coordinator was never ready.
    """
    now, made = time.monotonic(), self._child
    if made is None:
      if now >= self._due:
        self._start_again(now)
      return
    self._silent += min(now - self._looked, _LONGEST_LOOK)
    self._looked = now
    ended = made.has_ended()
    made.read_prints()
    if made.read():
      self._silent, self._is_ready = 0.0, True
      if self._drains and not self._knows_drain:
        # Only now: before its handler is installed, the signal would kill it.
        self._knows_drain = True
        made.signal(signal.SIGUSR1)
    hangs = self._silent >= (
      _SILENCE if self._is_ready else process.START_SECONDS
    )
    if not (ended or hangs):
      return
    made.kill()
    self._child = None
    code = made.popen.returncode
    if not self._is_ready:
      raise process.not_ready(code if ended else None, made.printed.tail())
    if self._drains and not code:
      return
    how = f"{child.ending(made.popen)}; it starts again"
    if not ended:
      how = f"has not answered for {_SILENCE:g} s, and is replaced"
    if not self._fails:
      self._say(f"process {made.pid} {how}")
    self._fails = code > 0 and now - self._began < _HEALTHY
    self._due = now + (_PAUSE if self._fails else 0.0)

  def _start_again(self, now: float) -> None:
    try:
      self._begin(now)
    except OSError as error:  # Out of processes or memory.
      self._say(f"it can't start again yet: {error}")
      self._due = now + _PAUSE

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
    began, said = time.monotonic(), False
    while self._child is not None or self._due < math.inf:
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
    if self._child is not None:
      self._child.signal(signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._child.popen.wait(_STOP_SECONDS)
      self._child.kill()
      self._child = None

  def _pass_on(self, label: str, line: str, error: bool) -> None:
    # The output of a coordinator that is never ready is in the error. A repeated
    # failure with the same line is not printed again.
    if self._is_ready and not (self._fails and line == self._last_line):
      self._last_line = line
      self._echo(label, line, error)

  def _say(self, text: str) -> None:
    self._echo("coordinator", text, True)


def settings_of(
  placement: Placement, environment: Environment, log: Log
) -> Settings | None:
  """How a launcher starts the coordinator; None if it starts none.

  Waits for a name that is not known yet.

  Args:
    placement: what runs on this host.
    environment: the environment of all replicas.
    log: the coordinator's.

  Raises:
    ValueError: the name is not known.
    LogError: its log can't be continued.
  """
  more: dict[str, Any] = {
    "journal": environment.journal,
    "certificates": environment.find_certificates(),
  }
  if environment.store is not None:
    return Settings(bind=environment.local_addr, **more)
  if placement.external or placement.rank:
    return None
  where = placement.address or f"127.0.0.1:{addresses.free_ports()[0]}"
  path = log.path
  if path is None:
    path = process.default_log(addresses.endpoint(where).port)
    server_log.check_own(path)
  if not (log.continues and server_log.goes_on(path, placement.replicas)):
    server_log.forget(path)
  return Settings.at(where, log=str(path), **more)
