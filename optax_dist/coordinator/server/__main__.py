"""The program of a coordinator's process; `process.start` starts one.

Its argument is its `process.Settings`, as JSON; ``optax-dist coordinator`` is for
people.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from optax_dist.coordinator.server import driver, places, process
from optax_dist.coordinator.server import log as logs
from optax_dist.coordinator.server.process import Settings
from optax_dist.coordinator.transport import addresses, sockets

# The longest wait for an event, in seconds.
_POLL_SECONDS = 0.5
# Seconds without a member after which a coordinator exits that was told to end: the
# first if the run is over or has not begun, the second if members may be cut off.
_DRAINED, _CUT_OFF = 1.0, 60.0


class _Owner:
  """The process that started the coordinator: signals its end, and gets messages."""

  def __init__(self, parent: int | None, channel: int | None):
    self.drained = threading.Event()
    self._ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, lambda *_: self._ended.set())
    # From its launcher: it ends once it has no members.
    signal.signal(signal.SIGUSR1, lambda *_: self.drained.set())
    self._parent, self._channel = parent, channel
    self._next_beat = 0.0
    if channel is not None:
      os.set_blocking(channel, False)

  @property
  def has_ended(self) -> bool:
    """Whether it is to end at once."""
    orphaned = self._parent is not None and os.getppid() != self._parent
    return orphaned or self._ended.is_set()

  def ready(self, address: object) -> None:
    """Says that it can be called."""
    if self._channel is None:
      print(f"{process.READY}{address}", flush=True)
    self.beat()

  def beat(self) -> None:
    """Tells its launcher, unless it did a moment ago, that its event loop turns."""
    if self._channel is None or time.monotonic() < self._next_beat:
      return
    self._next_beat = time.monotonic() + _POLL_SECONDS
    # Ignored if the channel is full: its reader may be stopped.
    with contextlib.suppress(OSError):
      os.write(self._channel, b'{"event": "beat"}\n')


def run(
  settings: Settings,
  secret: bytes,
  store: str | None,
  channel: int | None = None,
) -> int:
  """Runs a coordinator until its owner or a signal ends it.

  Args:
    settings: where it listens, and others.
    secret: the job's secret.
    store: a URL of etcd, where log, lease and address are; None for a log in a
      file.
    channel: the file on which it tells its launcher that it is alive; None for
      none.

  Returns:
    The exit code.
  """
  owner = _Owner(settings.parent, channel)
  # Each replica is a connection, and the usual limit is 1,024.
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(
    OSError, ValueError
  ):  # Not all systems allow as many.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  try:
    if store is None:
      _coordinate(settings, secret, None, owner)
      return 0
    lease = places.load("lease").Lease(store, secret, owner.beat)
    owner.ready(lease.where)
    try:
      if _acquire(lease, owner):
        _coordinate(settings, secret, lease, owner)
      return 0
    finally:
      lease.release()
  except (OSError, ValueError, logs.LogError) as error:
    print(f"The coordinator ends: {error}", file=sys.stderr)
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return process.TAKEN if taken else 1


def _acquire(lease: Any, owner: _Owner) -> bool:
  """Waits for the lease of the coordinator; returns whether it has it."""
  said: set[str] = set()
  while not (owner.has_ended or owner.drained.is_set()):
    if lease.acquire():
      return True
    if not lease.trouble:
      said.clear()
    elif lease.trouble not in said:
      said.add(lease.trouble)
      print(f"It waits for etcd: {lease.trouble}", file=sys.stderr, flush=True)
    owner.beat()
    time.sleep(_POLL_SECONDS)
  return False


def _coordinate(
  settings: Settings, secret: bytes, lease: Any, owner: _Owner
) -> None:
  """Coordinates until the owner or a signal ends it.

  Args:
    settings: see `run`.
    secret: the job's secret.
    lease: the lease in etcd, which it holds; None for a log in a file.
    owner: says when it is to end.

  Raises:
    OSError, ValueError: it can't listen.
    LogError: it can't use the log, or another coordinator may have the lease.
  """
  port, bind = settings.port, settings.bind
  if lease is None:
    bind = bind or "127.0.0.1"
  transport = sockets.Transport(
    driver.NAME,
    secret=secret,
    bind=bind,
    towards=None if lease is None else lease.where.host,
    # A coordinator that starts again needs the same port.
    ports=[port] if port else addresses.free_ports(),
    advertise=settings.advertise,
    certificates=settings.certificates,
  )
  default = process.default_log(transport.port or 0)
  path = pathlib.Path(settings.log or default)

  def open_log(name: str) -> logs.Log:
    if lease is not None:
      return logs.Log(places.load("log").EtcdRecords(lease, name))
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    of_run = f"{path}.{digest}" if name else path
    return logs.Log(logs.FileRecords(of_run))

  temporary = lease is None and path == default
  if temporary:
    logs.check_own(path)
  if lease is None and (settings.log is None or not temporary):
    # The log of an earlier job at this port must not be continued. If the port was
    # chosen here, any log is of an earlier job. And replicas don't restart a
    # coordinator that has a log of its own, so the port's default log is not needed.
    logs.forget_if_old(default, logs.OLD if temporary and port else 0.0)
  server = driver.Server(transport, open_log, settings.journal)
  if lease is None:
    # Behind the comma is a socket of this process, not of the next one.
    owner.ready(transport.address.partition(",")[0])
  else:
    lease.announce(transport.address)
  while not (owner.has_ended or _is_left(server, settings.idle, owner)):
    if lease is not None:
      lease.check()
    server.poll(_POLL_SECONDS)
    owner.beat()
  over = server.is_over
  server.close()
  if over and temporary:
    # The next coordinator at this port may have the log by now.
    with contextlib.suppress(OSError, logs.LogError):
      logs.forget(path)


def _is_left(server: driver.Server, idle: float | None, owner: _Owner) -> bool:
  """Whether it has had no member for so long that it ends."""
  drained = owner.drained.is_set()
  if server.is_over and (drained or idle is not None):
    idle = _DRAINED  # The next job may have the same address.
  elif drained:
    idle = _CUT_OFF if server.begun else _DRAINED
  return idle is not None and time.monotonic() - server.idle_since > idle


if __name__ == "__main__":
  sys.exit(
    run(
      msgspec.json.decode(sys.argv[1], type=Settings),
      bytes.fromhex(os.environ.get(process.SECRET_VARIABLE, "")),
      os.environ.get(process.STORE_VARIABLE) or None,
      int(os.environ.get(process.CHANNEL_VARIABLE) or 0) or None,
    )
  )
