"""Injects faults into real processes, and checks invariants.

python -m tests.chaos --seeds 0:300
python -m tests.chaos --seeds 0:300 --only pause-all   # or stop-one, cut-host
python -m tests.chaos --processes-per-replica 2

Four of five seeds are the matrix: SIGKILL, SIGSTOP and SIGCONT, delays, broken
connections and forged messages, in each phase of a step or a replica; they strike
that replica, or the coordinator, which is started again from its log. Every fifth
is an outage that is longer than deadlines: all processes are paused at once, one is
stopped, or the host of one is cut off again and again (network namespaces, which
need root; without it these runs fail and say why). After each run it is checked
that it went on until it was told to finish, that steps were committed once and in
order, that all replicas held the same parameters and optimizer state after each
step, that every gradient was applied once, dropped for a reason or lost with its
process, that each leased sample was in one step or is listed among those left over,
that nobody was removed because the coordinator was killed, that no wait passed its
deadline, and that no process is left. The exit code is 1 if anything was wrong.

With --processes-per-replica M there are two replicas of M processes, each of which
runs one JAX program with sharded arrays. In one long run, each seed kills one
process in one phase; its replica ends with it, the other one must continue alone,
and the replica must come back as a whole. With M = 2 the matrix has 36 seeds.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

# Where helpers of the tests lie, as pytest has it.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "helpers"))

from tests.chaos import cases, group_run, outages, replica
from tests.chaos import run as runs
from tests.chaos.pool import Pool


def seeds(text: str) -> list[int]:
  """An argument type: seeds and ranges of them, such as 3,8,20:50."""
  result: list[int] = []
  for part in text.split(","):
    first, between, end = part.partition(":")
    try:
      some = range(int(first), int(end) if between else int(first) + 1)
    except ValueError:
      some = range(0)
    if not some or some.start < 0:
      raise argparse.ArgumentTypeError(
        "must be seeds or FIRST:END with 0 <= FIRST < END, such as 3,8,20:50,"
        f" got {text!r}"
      )
    result += some
  return result


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
  """The parser of a command that runs seeds with real processes."""
  made = argparse.ArgumentParser(
    prog=f"python -m {module}",
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = made.add_argument
  add("--seeds", metavar="FIRST:END", type=seeds, help="default: 0:50")
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help="keep journals and outputs there (default: nowhere)",
  )
  return made


def main(argv: list[str] | None = None) -> int:
  """Runs the seeds, prints a table, and returns the exit code."""
  options = parser("tests.chaos", __doc__)
  add = options.add_argument
  add("--only", choices=cases.OUTAGES, help="run only this kind of outage")
  add("--processes-per-replica", metavar="M", type=int, default=1)
  args = options.parse_args(argv)
  several = args.processes_per_replica > 1
  if several and args.only:
    options.error("--only is for replicas of one process")
  result = [cases.case(seed) for seed in args.seeds or range(50)]
  if args.only:
    result = [one for one in result if one.fault == args.only]
  if not result:
    some = (seed for seed in range(100) if cases.case(seed).fault == args.only)
    options.error(
      f"none of the seeds is a run of {args.only}: give some of"
      f" {', '.join(map(str, some))}, ... in --seeds"
    )
  with tempfile.TemporaryDirectory() as temporary:
    folder = args.output or pathlib.Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    if several:
      wrong = group_run.run(folder, args.seeds, args.processes_per_replica)
    else:
      wrong = run(folder, result)
  return 1 if wrong else 0


def run(folder: pathlib.Path, found: Sequence[cases.Case]) -> bool:
  """Runs the cases and prints their table; returns whether any was wrong."""
  results: list[runs.Result] = []
  with Pool(folder, replica.main, "fork") as pool:
    try:
      for case in found:
        make = outages.run if case.fault == "cut-host" else runs.run
        results.append(make(pool, case))
        problems = "; ".join(results[-1].problems) or "ok"
        print(
          f"seed {case.seed}, {case}: {results[-1].steps} steps in"
          f" {results[-1].seconds:.0f} s, {problems}",
          flush=True,
        )
    except KeyboardInterrupt:
      print(f"interrupted after {len(results)} of {len(found)} runs")
  _show(results)
  return len(results) < len(found) or any(r.problems for r in results)


def _show(results: list[runs.Result]) -> None:
  """Prints, for each phase and fault, how many of its runs went well."""
  cells: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
  for result in results:
    cells[result.case.phase, result.case.fault].append(result)
  for (phase, fault), some in sorted(cells.items()):
    good = sum(not r.problems for r in some)
    print(f"{phase:<20} {fault:<12} {good}/{len(some)}")
  counts = collections.Counter(r.outcome for r in results)
  print(
    f"{len(results)} runs in {sum(r.seconds for r in results):.0f} s,"
    f" {sum(r.steps for r in results):,} steps: "
    + ", ".join(f"{counts[word]} {word}" for word in runs.OUTCOMES)
  )


if __name__ == "__main__":
  raise SystemExit(main())
