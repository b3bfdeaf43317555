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
runs one JAX program with sharded arrays. Each seed kills one process in one phase,
or the coordinator; the process' replica ends with it, the other one must continue
alone, and the replica must come back as a whole. With M = 2 there are 68 seeds.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

# Where helpers of the tests lie, as pytest has it.
sys.path.extend(
  str(pathlib.Path(__file__).parents[1] / "helpers" / name)
  for name in ("networks", "processes")
)

from tests.chaos import cases
from tests.chaos import run as runs
from tests.runs import command


def main(argv: list[str] | None = None) -> int:
  """Runs the seeds, prints a table, and returns the exit code."""
  options = command.parser("tests.chaos", __doc__)
  add = options.add_argument
  add("--only", choices=cases.OUTAGES, help="run only this kind of outage")
  add("--processes-per-replica", metavar="M", type=int, default=1)
  args = options.parse_args(argv)
  processes = args.processes_per_replica
  if processes > 1:
    if args.only:
      options.error("--only is for replicas of one process")
    every = args.seeds or range(cases.kills(processes))
    chosen = [cases.kill(seed, processes) for seed in every]
  else:
    chosen = [cases.case(seed) for seed in args.seeds or range(50)]
  if args.only:
    chosen = [one for one in chosen if one.fault == args.only]
  if not chosen:
    some = (seed for seed in range(100) if cases.case(seed).fault == args.only)
    options.error(
      f"none of the seeds is a run of {args.only}: give some of"
      f" {', '.join(map(str, some))}, ... in --seeds"
    )
  with command.folder(args.output) as folder:
    results = command.run_all(
      chosen,
      lambda case: runs.run(folder, case),
      lambda r: f"{r.steps} steps, {r.compared} fingerprints compared",
    )
  _show(results)
  return len(results) < len(chosen) or any(r.problems for r in results)


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
