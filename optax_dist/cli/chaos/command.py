"""``optax-dist chaos``: the fault matrix, with real processes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import tempfile
from typing import Any

from optax_dist.cli import errors, installed, output, output_files, parser

_DESCRIPTION = """\
Starts replicas as processes on this machine and injects faults: SIGKILL,
SIGSTOP and SIGCONT, delays, broken connections, and forged messages, in each
phase of a step, a replica's or the leader's. After each run it checks that steps were
committed once and in order, that all replicas held the same parameters and optimizer
state after each step, that every gradient was applied once, dropped for a reason or
lost with its process, that no wait passed its deadline, and that no process is left.
In two of three runs samples are leased: each must be in one committed step of its
epoch, or be listed among those left over.
A seed is a run; 110 in a row are the whole matrix (11 phases, 5 faults, and whether
the leader is hit). The exit code is 1 if anything was wrong.

With --processes-per-replica M there are two replicas of M processes, each of which
runs one JAX program with sharded arrays. In one long run, each seed kills one
process in one phase; its replica ends with it, the other one must continue alone,
and the replica must come back as a whole. With M = 2 the matrix has 36 seeds."""

_FAILED = 1


def add_parser(commands) -> None:
  """Adds the ``chaos`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "chaos",
    run,
    help="inject faults into real processes, and check invariants",
    description=_DESCRIPTION,
  )
  add = command.add_argument
  add(
    "--seeds",
    metavar="FIRST:END",
    type=_seeds,
    help="which runs to make (default: 0:50; of replicas of several processes"
    " the whole matrix)",
  )
  parser.add_number(
    command,
    "--processes-per-replica",
    "M",
    parser.whole_number(1),
    default=1,
    help="processes of each replica",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help="keep journals and outputs there (default: nowhere)",
  )
  parser.add_file(command, "--json", "write all outcomes")


def _seeds(text: str) -> range:
  """An argument type: a range of seeds, such as 0:50."""
  first, _, end = text.partition(":")
  try:
    found = range(int(first), int(end))
  except ValueError:
    found = range(0)
  if not found or found.start < 0:
    raise argparse.ArgumentTypeError(
      f"must be FIRST:END with 0 <= FIRST < END, such as 0:50, got {text!r}"
    )
  return found


def run(args: argparse.Namespace) -> int:
  """Runs the ``chaos`` command with its parsed arguments."""
  installed.check()
  output_files.check_writable(args.json)
  with contextlib.ExitStack() as stack:
    if args.output is None:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    else:
      folder = args.output
      output.prepare(folder, [])
    if args.processes_per_replica > 1:
      from optax_dist.cli.chaos import group_report

      results, wrong = group_report.run(
        folder, args.seeds, args.processes_per_replica
      )
    else:
      results, wrong = _run(folder, args.seeds or range(50))
  if args.json:
    output_files.write_json(args.json, [_plain(r) for r in results])
  return _FAILED if wrong or any(r.problems for r in results) else 0


def _run(folder: pathlib.Path, seeds: range) -> tuple[list[Any], bool]:
  """The runs of the seeds, and whether anything else was wrong."""
  from optax_dist.cli import bar
  from optax_dist.cli.chaos import cases as chaos_cases
  from optax_dist.cli.chaos import run as chaos_run

  results: list[chaos_run.Result] = []
  with contextlib.ExitStack() as stack:
    shown = stack.enter_context(bar.bar("striking", len(seeds)))
    pool = stack.enter_context(chaos_run.Pool(folder))
    try:
      for seed in seeds:
        result = chaos_run.run(pool, chaos_cases.case(seed))
        results.append(result)
        shown(len(results))
        for problem in result.problems:
          print(f"seed {seed}, {result.case}: {problem}", flush=True)
    except KeyboardInterrupt:
      raise errors.Interrupted(
        f"interrupted after {len(results)} of {len(seeds)} runs"
      ) from None
  left = pool.orphans()
  _show(results)
  if left:
    print(f"processes are left: {left}")
  return results, bool(left)


def _plain(result: Any) -> dict[str, Any]:
  case = result.case
  return {
    "seed": case.seed,
    "phase": case.phase,
    "fault": case.fault,
    "who": case.who,
    "outcome": result.outcome,
    "problems": result.problems,
    "seconds": round(result.seconds, 2),
    "steps": result.steps,
  }


def _show(results: list[Any]) -> None:
  """Prints the matrix: for each phase and fault, how many runs succeeded."""
  from optax_dist.cli import tables
  from optax_dist.cli.chaos import cases as chaos_cases

  cells: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
  for result in results:
    cells[result.case.phase, result.case.fault].append(result)
  shown = tables.table("runs that went well, of all, by phase and fault")
  shown.add_column("phase", no_wrap=True)
  for fault in chaos_cases.FAULTS:
    shown.add_column(fault, justify="right")
  for phase in chaos_cases.PHASES:
    row = []
    for fault in chaos_cases.FAULTS:
      found = cells[phase, fault]
      good = sum(not r.problems for r in found)
      row.append(f"{good}/{len(found)}" if found else "")
    shown.add_row(phase, *row)
  tables.show(shown)
  counts = collections.Counter(r.outcome for r in results)
  print(
    f"{len(results)} runs in {sum(r.seconds for r in results):.0f} s:"
    f" {counts['ok']} ok, {counts['hang']} hangs, {counts['diverged']}"
    f" divergences, {counts['wrong']} wrong, {counts['not struck']} not struck;"
    f" the leader was struck in {sum(r.case.who == 'leader' for r in results)};"
    f" {sum(r.steps for r in results):,} steps"
  )


__all__ = ["add_parser", "run"]
