"""The program of a store process; `process.start` starts one.

Run it as ``python -m optax_dist.coordinator.store --bind 0.0.0.0 --port
29300``, with the job's secret in OPTAX_DIST_SECRET.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time

from optax_dist.coordinator.store import process, server, wire
from optax_dist.coordinator.transport import channels, sockets

# Seconds without a client after which a draining store exits.
_DRAINED = 1.0


def _main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog=f"python -m {__package__}",
    description="Keep the keys of a job, until asked to end.",
  )
  parser.add_argument("--bind", default="127.0.0.1")
  parser.add_argument("--port", type=int, default=process.PORT)
  parser.add_argument("--advertise")
  parser.add_argument(
    "--certificates", nargs=3, metavar=("CERTIFICATE", "KEY", "AUTHORITY")
  )
  parser.add_argument(
    "--idle", type=float, help="seconds without a client after which it exits"
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
      wire.STORE,
      secret=secret,
      bind=options.bind,
      ports=[options.port],
      advertise=options.advertise,
      certificates=options.certificates
      and channels.Certificates(*options.certificates),
    )
  except (OSError, ValueError) as error:
    print(f"The store can't listen: {error}", file=sys.stderr)
    return 1
  drained = threading.Event()
  if options.lifeline:
    threading.Thread(
      target=_end_with_stdin, args=(drained,), daemon=True
    ).start()
  kept = server.StoreServer(transport)
  print(f"{process.READY}{transport.address}", flush=True)
  seen = time.monotonic()
  while not ended.is_set():
    kept.poll(0.2)
    if kept.clients:
      seen = time.monotonic()
    else:
      idle = _DRAINED if drained.is_set() else options.idle
      if idle is not None and time.monotonic() - seen > idle:
        break
  kept.close()
  return 0


def _end_with_stdin(drained: threading.Event) -> None:
  while os.read(sys.stdin.fileno(), 4096):
    drained.set()
  # Immediately: the parent is gone, and so is the job.
  os._exit(0)


if __name__ == "__main__":
  sys.exit(_main())
