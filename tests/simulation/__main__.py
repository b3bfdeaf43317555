"""Runs schedules from the command line.

python -m tests.simulation --schedules 20000 --seed 7 --workers 2
python -m tests.simulation --replay 7000123
python -m tests.simulation --planted all
python -m tests.simulation --groups --schedules 20000
python -m tests.simulation --leases --schedules 20000
python -m tests.simulation --slots --schedules 20000
python -m tests.simulation --fragments --schedules 20000
python -m tests.simulation --groups --leases --schedules 20000
python -m tests.simulation --leases --bad --schedules 20000
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import sys
import time
from typing import Any

from tests.simulation import (
  bad,
  faults,
  fragments,
  groups,
  leases,
  planted,
  shrink,
  slots,
)

# So that no two `--seed`s share a schedule.
_SPREAD = 1_000_000
_BATCH = 100


# Replicas of one process, of several, with samples that are leased, with steps of
# fixed micro-batches, and learners that merge fragments; with a bad replica or not.
_KINDS: dict[str, Any] = {
  "": faults,
  "--groups": groups,
  "--leases": leases,
  "--slots": slots,
  "--groups --leases": groups.Leased,
  "--fragments": fragments,
  "--bad": bad.plain,
  "--leases --bad": bad.leased,
  "--slots --bad": bad.of_slots,
  "--fragments --bad": bad.of_fragments,
  "--groups --bad": bad.of_groups,
}


def _batch(
  name: str, first: int, count: int
) -> tuple[int, int, int, list[tuple[int, str]]]:
  steps = events = ended = 0
  wrong = []
  kind = _KINDS[name]
  for seed in range(first, first + count):
    result = kind.run(kind.schedule(seed))
    steps += result.steps
    events += result.events
    ended += result.ended
    if result.violation:
      wrong.append((seed, result.violation))
  return steps, events, ended, wrong


def _schedules(name: str, count: int, seed: int, workers: int) -> int:
  began = time.perf_counter()
  first = seed * _SPREAD
  starts = range(first, first + count, _BATCH)
  sizes = [min(_BATCH, first + count - start) for start in starts]
  steps = events = ended = 0
  wrong: list[tuple[int, str]] = []
  with concurrent.futures.ProcessPoolExecutor(workers) as pool:
    for s, e, d, b in pool.map(functools.partial(_batch, name), starts, sizes):
      steps, events, ended = steps + s, events + e, ended + d
      for at, violation in b:
        print(f"seed {at}: {violation}", flush=True)
      wrong += b
  took = time.perf_counter() - began
  print(
    f"{count} schedules (seeds {first} to {first + count - 1}), {steps} steps "
    f"committed, {ended} runs ended well, {events} events, {len(wrong)} "
    f"violations, {took:.1f} s"
  )
  if wrong:
    print(f"python -m tests.simulation {name} --replay {wrong[0][0]}")
  return int(bool(wrong))


def _replay(kind: Any, seed: int, events: bool) -> int:
  schedule = kind.schedule(seed)
  result = kind.run(schedule)
  if result.violation:
    what = result.violation.partition(":")[0]
    schedule = shrink.shrink(
      schedule, lambda s: kind.run(s).violation.startswith(what)
    )
  result = kind.run(schedule, trace=True)
  print("\n".join(result.trace if events else result.transcript))
  print(f"\nseed {seed}: {schedule.setting}")
  for at, kind, details in schedule.faults:
    print(f"  {at:.4f} s: {kind} {details}")
  print(result.violation or f"no violation, {result.steps} steps committed")
  return int(bool(result.violation))


def _planted(which: str, most: int) -> int:
  chosen = [f for f in planted.FAULTS if which in ("all", f.name)]
  missed = 0
  for fault in chosen:
    began = time.perf_counter()
    results = planted.find(fault, most)
    took = time.perf_counter() - began
    what = f"NOT FOUND in {most} schedules"
    if results is not None:
      what = f"found by seed {results.schedule.seed}: {results.violation:.100}"
    missed += results is None
    print(f"{fault.name} ({took:.1f} s): {what}", flush=True)
  print(f"{len(chosen) - missed} of {len(chosen)} planted faults found")
  return int(bool(missed))


def main(argv: list[str] | None = None) -> int:
  """The exit status: 1 where there is a violation, or a fault is missed."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.simulation",
    description="Runs the coordinator's protocol in a world of faults.",
  )
  add = parser.add_argument
  add("--schedules", type=int, default=2000, help="how many to run")
  add("--seed", type=int, default=0, help="which ones")
  add("--workers", type=int, default=1, help="processes to run them in")
  add("--replay", type=int, metavar="SEED", help="prints one, made small")
  add("--events", action="store_true", help="all events of what is replayed")
  add("--planted", metavar="NAME", help="a planted fault's name, or all")
  add("--within", type=int, default=1_000, help="schedules to find it in")
  add("--groups", action="store_true", help="replicas of several processes")
  add("--leases", action="store_true", help="samples that are leased")
  add("--slots", action="store_true", help="steps of fixed micro-batches")
  add("--fragments", action="store_true", help="learners that never wait")
  add("--bad", action="store_true", help="a replica does something wrong")
  options = parser.parse_args(argv)
  for what, count in (
    ("--schedules", options.schedules),
    ("--workers", options.workers),
    ("--within", options.within),
  ):
    if count < 1:
      parser.error(f"{what} must be at least 1, got {count}: nothing would run")
  names = ("all", *(fault.name for fault in planted.FAULTS))
  if options.planted is not None and options.planted not in names:
    parser.error(f"there is no planted fault {options.planted!r}")
  kinds = ("groups", "leases", "slots", "fragments", "bad")
  name = " ".join(f"--{kind}" for kind in kinds if getattr(options, kind))
  if name not in _KINDS:
    parser.error(f"there are no schedules with {name}")
  if options.replay is not None:
    return _replay(_KINDS[name], options.replay, options.events)
  if options.planted is not None:
    return _planted(options.planted, options.within)
  return _schedules(name, options.schedules, options.seed, options.workers)


if __name__ == "__main__":
  sys.exit(main())
