"""The program of a coordinator's process; `process.start` starts one.

Run it as ``optax-dist coordinator --bind 0.0.0.0 --port 29300``, with the job's
secret in OPTAX_DIST_SECRET.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from optax_dist.coordinator.server import driver, places, process
from optax_dist.coordinator.server import log as logs
from optax_dist.coordinator.transport import addresses, sockets, tls

# The longest wait for an event, in seconds.
_POLL_SECONDS = 0.5
# Seconds without a member after which one exits that was told to: if the run is
# over or has not begun, and if its members may only be cut off.
_DRAINED, _CUT_OFF = 1.0, 60.0


class _Beats:
  """What it prints for whoever watches it."""

  def __init__(self, wanted: bool):
    self._next = 0.0 if wanted else math.inf
    if wanted:
      os.set_blocking(sys.stdout.fileno(), False)

  def beat(self) -> None:
    """Prints a line, unless one was printed a moment ago."""
    if time.monotonic() < self._next:
      return
    self._next = time.monotonic() + _POLL_SECONDS
    # Not while it is full: whoever reads it may have been stopped.
    with contextlib.suppress(OSError):
      os.write(sys.stdout.fileno(), f"{process.BEAT}\n".encode())


def main(
  arguments: list[str] | None = None, secret: bytes | None = None
) -> int:
  """Runs a coordinator until it is told to end.

  Args:
    arguments: None for those of the process.
    secret: the job's secret; None for that of the environment.
  """
  parser = argparse.ArgumentParser(
    prog=f"python -m {__package__}",
    description="Coordinate the replicas of a job, until asked to end.",
  )
  parser.add_argument("--bind")
  parser.add_argument("--port", type=int)
  parser.add_argument("--advertise")
  parser.add_argument("--log", help="the file that outlives this process")
  parser.add_argument("--journal", help="the file to write events to")
  parser.add_argument(
    "--certificates", nargs=3, metavar=("CERTIFICATE", "KEY", "AUTHORITY")
  )
  parser.add_argument(
    "--idle", type=float, help="seconds without a member after which it exits"
  )
  parser.add_argument(
    "--lifeline", action="store_true", help="exit when standard input ends"
  )
  parser.add_argument(
    "--beats", action="store_true", help="print a line while it is alive"
  )
  parser.add_argument("--hex-secret", action="store_true")
  parser.add_argument(
    "--store",
    help="etcd://a,b,c, where log, lease and address are; one with a password is"
    f" in {process.STORE_VARIABLE}",
  )
  options = parser.parse_args(arguments)
  text = os.environ.get(process.SECRET_VARIABLE, "")
  if secret is None:
    secret = bytes.fromhex(text) if options.hex_secret else text.encode()
  return run(options, secret)


def run(options: argparse.Namespace, secret: bytes) -> int:
  """Runs a coordinator until it is told to end.

  Args:
    options: those of `main`.
    secret: the job's secret.

  Returns:
    The exit code.
  """
  ended = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ended.set())
  drained = threading.Event()
  if options.lifeline:
    threading.Thread(
      target=_end_with_stdin, args=(drained,), daemon=True
    ).start()
  standby = None
  try:
    url = places.of_coordinator(
      options.store, os.environ.get(process.STORE_VARIABLE)
    )
    if url:
      standby = places.load("lease").Lease(url, secret)
      print(f"{process.READY}{standby.where}", flush=True)
      beats = _Beats(options.beats)
      ends = lambda: ended.is_set() or drained.is_set()
      if not _acquire(standby, ends, beats):
        standby.release()
        return 0
  except (OSError, ValueError, logs.LogError) as error:
    print(f"The coordinator can't start: {error}", file=sys.stderr)
    return 1
  try:
    return _coordinate(options, secret, standby, ended, drained)
  except logs.LogError as error:
    print(f"The coordinator ends: {error}", file=sys.stderr)
    return 1
  finally:
    if standby is not None:
      standby.release()


def _acquire(standby: Any, ends: Callable[[], bool], beats: _Beats) -> bool:
  """Waits for the lease of the coordinator; returns False if `ends` says so."""
  told = ""
  while not ends():
    if standby.acquire():
      return True
    if standby.trouble and standby.trouble != told:
      print(
        f"It waits for etcd: {standby.trouble}", file=sys.stderr, flush=True
      )
    told = standby.trouble
    beats.beat()
    time.sleep(_POLL_SECONDS)
  return False


def _coordinate(
  options: argparse.Namespace,
  secret: bytes,
  standby: Any,
  ended: threading.Event,
  drained: threading.Event,
) -> int:
  """Coordinates until it is told to end.

  Args:
    options: those of `main`.
    secret: the job's.
    standby: has the lease in etcd; None for a log in a file.
    ended: set when it is to end.
    drained: set when it is to end once it has no members.

  Returns:
    The exit code.

  Raises:
    LogError: another coordinator may have the lease.
  """
  port = options.port
  if port is None:
    port = process.PORT if standby is None else 0
  bind = options.bind
  if bind is None and standby is None:
    bind = "127.0.0.1"
  try:
    transport = sockets.Transport(
      driver.NAME,
      secret=secret,
      bind=bind,
      towards=None if standby is None else standby.where.host,
      # Whoever starts it again needs the same port.
      ports=[port] if port else addresses.free_ports(),
      advertise=options.advertise,
      certificates=options.certificates
      and tls.Certificates(*options.certificates),
    )
  except (OSError, ValueError) as error:
    print(f"The coordinator can't listen: {error}", file=sys.stderr)
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return process.TAKEN if taken else 1
  path = options.log or process.default_log(transport.port or port)

  def open_log(name: str) -> logs.Log:
    if standby is not None:
      return logs.Log(places.load("log").EtcdRecords(standby, name))
    if not name:
      return logs.Log(logs.FileRecords(path))
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return logs.Log(logs.FileRecords(f"{path}.{digest}"))

  try:
    if options.log is None and standby is None:
      if port:
        logs.forget_if_old(path)
      else:
        logs.forget(path)  # Nobody has started one here before, for this job.
    server = driver.Server(transport, open_log, options.journal)
  except logs.LogError as error:
    print(f"The coordinator can't start: {error}", file=sys.stderr)
    return 1
  if standby is None:
    print(f"{process.READY}{transport.address}", flush=True)
  else:
    standby.announce(transport.address)
  beats = _Beats(options.beats)
  while not ended.is_set():
    if standby is not None:
      standby.check()
    server.poll(_POLL_SECONDS)
    beats.beat()
    if _is_left(server, options.idle, drained.is_set()):
      break
  over = server.is_over
  server.close()
  if over and options.log is None and standby is None:
    pathlib.Path(path).unlink(missing_ok=True)
  return 0


def _is_left(server: driver.Server, idle: float | None, drained: bool) -> bool:
  """Whether it has had no member for so long that it ends."""
  if server.is_over and (drained or idle is not None):
    idle = _DRAINED  # The next job may have the same address.
  elif drained:
    idle = _CUT_OFF if server.has_begun else _DRAINED
  return idle is not None and time.monotonic() - server.idle_since > idle


def _end_with_stdin(drained: threading.Event) -> None:
  while os.read(sys.stdin.fileno(), 4096):
    drained.set()
  # Immediately: the parent is gone, and so is the job.
  os._exit(0)


if __name__ == "__main__":
  sys.exit(main())
