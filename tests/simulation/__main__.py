"""Runs schedules from the command line; see `python -m tests.simulation -h`."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time

from tests.simulation import faults


def _batch(
  first: int, count: int
) -> tuple[int, int, int, list[tuple[int, str]]]:
  steps = events = ended = 0
  bad = []
  for seed in range(first, first + count):
    result = faults.run(faults.schedule(seed))
    steps += result.steps
    events += result.events
    ended += result.ended
    if result.violation:
      bad.append((seed, result.violation))
  return steps, events, ended, bad


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.simulation")
  parser.add_argument("--schedules", type=int, default=2000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workers", type=int, default=1)
  parser.add_argument("--replay", type=int)
  options = parser.parse_args()
  if options.replay is not None:
    result = faults.run(faults.schedule(options.replay), trace=True)
    print(result.schedule)
    print("\n".join(result.trace))
    print(result.violation or "no violation")
    return int(bool(result.violation))
  began = time.perf_counter()
  first = options.seed * 1_000_000
  size = 100
  batches = [
    (first + at, min(size, options.schedules - at))
    for at in range(0, options.schedules, size)
  ]
  steps = events = ended = 0
  bad: list[tuple[int, str]] = []
  if options.workers > 1:
    with concurrent.futures.ProcessPoolExecutor(options.workers) as pool:
      results = list(pool.map(_batch, *zip(*batches, strict=True)))
  else:
    results = [_batch(*batch) for batch in batches]
  for s, e, d, b in results:
    steps, events, ended = steps + s, events + e, ended + d
    bad += b
  took = time.perf_counter() - began
  for seed, violation in bad[:20]:
    print(f"seed {seed}: {violation}")
  print(
    f"{options.schedules} schedules, {steps} steps committed, {ended} ended "
    f"well, {events} events, {len(bad)} violations, {took:.1f} s"
  )
  return int(bool(bad))


if __name__ == "__main__":
  sys.exit(main())
