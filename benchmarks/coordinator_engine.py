"""Messages and arrays between two processes of one host.

    python benchmarks/coordinator_engine.py [--quick]

For each way to exchange arrays: how long a message takes to the other process,
how long an array takes that is offered, fetched and copied there, and what both
processes fetch and copy per second when both do at once. Medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from optax_dist.coordinator import engine, jax_runtime, service

_LIMIT = 300.0


def _message(of: engine.Engine, me: int, rounds: int) -> float:
  """Seconds for one message, by passing one back and forth."""
  times = []
  for i in range(rounds):
    started = time.perf_counter()
    if me == 0:
      of.board.put(f"ball/{i}/0", b"x" * 100)
      of.board.get(f"ball/{i}/1", _LIMIT)
    else:
      of.board.get(f"ball/{i}/0", _LIMIT)
      of.board.put(f"ball/{i}/1", b"x" * 100)
    times.append((time.perf_counter() - started) / 2)
  return statistics.median(times[rounds // 5 :])


def _array(
  of: engine.Engine, me: int, peer: str, nbytes: int, rounds: int, first: int
) -> float:
  """Seconds for one array, by passing one back and forth."""
  x, here = of.exchange, np.zeros(nbytes, np.uint8)

  def give(ticket: int) -> None:
    buffer = x.buffer(nbytes)
    np.copyto(buffer, here)
    x.offer(ticket, buffer, [peer])
    given.append(buffer)

  def take(ticket: int) -> None:
    np.copyto(here, x.fetch(peer, ticket, nbytes, _LIMIT).array)

  times = []
  given: list[np.ndarray] = []
  for i in range(rounds):
    started = time.perf_counter()
    turns: list[Callable[[int], None]] = (
      [give, take] if me == 0 else [take, give]
    )
    for turn, act in enumerate(turns):
      act(first + 2 * i + turn)
    times.append((time.perf_counter() - started) / 2)
    # The other one has fetched it, as it has answered, or gets one answer more.
    if len(given) > 1:
      x.recycle(given.pop(0))
  return statistics.median(times[rounds // 5 :])


def _both(
  of: engine.Engine, me: int, peer: str, nbytes: int, rounds: int, first: int
) -> float:
  """Bytes per second that each fetches, both at once."""
  x, here = of.exchange, np.zeros(nbytes, np.uint8)
  rates = []
  given: list[np.ndarray] = []
  for i in range(rounds):
    buffer = x.buffer(nbytes)
    buffer[:] = i
    of.board.put(f"ready/{first + i}/{me}", b"")
    of.board.get(f"ready/{first + i}/{1 - me}", _LIMIT)
    started = time.perf_counter()
    x.offer(first + 2 * i + me, buffer, [peer])
    fetched = x.fetch(peer, first + 2 * i + 1 - me, nbytes, _LIMIT)
    np.copyto(here, fetched.array)
    fetched.check()
    rates.append(nbytes / (time.perf_counter() - started))
    given.append(buffer)
    if len(given) > 1:
      x.recycle(given.pop(0))
  return statistics.median(rates[rounds // 4 :])


def _peer(address: str, me: int, exchange: str, quick: bool) -> None:
  of = jax_runtime.connect(address, me, exchange=exchange)
  of.board.put(f"address/{me}", of.exchange.address.encode())
  peer = of.board.get(f"address/{1 - me}", _LIMIT).decode()
  rounds = 20 if quick else 400
  big = 5_000_000 if quick else 50_000_000
  found = {
    "message_ms": 1e3 * _message(of, me, rounds),
    "4KB_ms": 1e3 * _array(of, me, peer, 4096, rounds, 0),
    "2MB_ms": 1e3 * _array(of, me, peer, 2 << 20, rounds // 4, 10_000),
    f"{big // 10**6}MB_both_ways_GBps": 1e-9
    * _both(of, me, peer, big, 8 if quick else 20, 20_000),
  }
  of.board.put(f"done/{me}", b"")
  of.board.get(f"done/{1 - me}", _LIMIT)
  of.close()
  if me == 0:
    print(json.dumps({k: round(v, 4) for k, v in found.items()}))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.peer:
    address, me, exchange = options.peer
    _peer(address, int(me), exchange, options.quick)
    return
  for exchange in ("shared_memory", "transfer"):
    with service.start("127.0.0.1:0", 2) as hosted:
      command = [sys.executable, __file__, *sys.argv[1:]]
      peers = [
        subprocess.Popen(
          [*command, "--peer", hosted.address, str(i), exchange],
          stdout=subprocess.PIPE,
        )
        for i in range(2)
      ]
      try:
        said = [peer.communicate(timeout=_LIMIT)[0] for peer in peers]
      finally:
        for peer in peers:
          peer.kill()
          peer.wait()
    print(exchange, said[0].decode().strip(), flush=True)


if __name__ == "__main__":
  main()
