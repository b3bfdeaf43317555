"""The program of a coordinator's process; `process.start` starts one.

Run it as ``optax-dist coordinator --bind 0.0.0.0 --port 29300``, with the job's
secret in OPTAX_DIST_SECRET.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import pathlib
import signal
import sys
import threading
import time

from optax_dist.coordinator.server import driver, process
from optax_dist.coordinator.server import log as logs
from optax_dist.coordinator.transport import addresses, channels, sockets

# The longest wait for an event, and the time without a member after which one
# exits that was told to, in seconds.
_SLICE, _DRAINED = 0.5, 1.0


def main(arguments: list[str] | None = None) -> int:
  """Runs a coordinator until it is told to end."""
  parser = argparse.ArgumentParser(
    prog=f"python -m {__package__}",
    description="Coordinate the replicas of a job, until asked to end.",
  )
  parser.add_argument("--bind", default="127.0.0.1")
  parser.add_argument("--port", type=int, default=process.PORT)
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
  parser.add_argument("--hex-secret", action="store_true")
  options = parser.parse_args(arguments)
  text = os.environ.get(process.SECRET_VARIABLE, "")
  secret = bytes.fromhex(text) if options.hex_secret else text.encode()
  ended = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ended.set())
  try:
    transport = sockets.Transport(
      driver.NAME,
      secret=secret,
      bind=options.bind,
      # Whoever starts it again needs the same port.
      ports=[options.port] if options.port else addresses.free_ports(),
      advertise=options.advertise,
      certificates=options.certificates
      and channels.Certificates(*options.certificates),
    )
  except (OSError, ValueError) as error:
    print(f"The coordinator can't listen: {error}", file=sys.stderr)
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return process.TAKEN if taken else 1
  path = options.log or process.default_log(transport.port or options.port)
  if options.log is None:
    logs.forget_if_old(path)

  def open_log(name: str) -> logs.FileLog:
    if not name:
      return logs.FileLog(path)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return logs.FileLog(pathlib.Path(f"{path}.{digest}"))

  try:
    server = driver.Server(transport, open_log, options.journal)
  except logs.LogError as error:
    print(f"The coordinator can't start: {error}", file=sys.stderr)
    return 1
  drained = threading.Event()
  if options.lifeline:
    threading.Thread(
      target=_end_with_stdin, args=(drained,), daemon=True
    ).start()
  print(f"{process.READY}{transport.address}", flush=True)
  while not ended.is_set() and not server.outdated:
    server.poll(_SLICE)
    idle = options.idle
    if drained.is_set() or (server.is_over and idle is not None):
      idle = _DRAINED  # The next job may have the same address.
    if idle is not None and time.monotonic() - server.idle_since > idle:
      break
  over = server.is_over
  server.close()
  if over and options.log is None:
    pathlib.Path(path).unlink(missing_ok=True)
  return 0


def _end_with_stdin(drained: threading.Event) -> None:
  while os.read(sys.stdin.fileno(), 4096):
    drained.set()
  # Immediately: the parent is gone, and so is the job.
  os._exit(0)


if __name__ == "__main__":
  sys.exit(main())
