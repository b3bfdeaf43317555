"""Runs the kills of `group_run`, and prints their table."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import statistics

from optax_dist.cli import bar, errors, tables
from optax_dist.cli.chaos import group_cases, group_run


def run(
  folder: pathlib.Path, seeds: range | None, processes: int
) -> tuple[list[group_run.Result], bool]:
  """Kills processes of two replicas, and prints the results.

  Args:
    folder: an existing folder for journals and outputs.
    seeds: seeds of the kills; None for the whole matrix.
    processes: processes of each replica.

  Returns:
    All results, and whether anything else was wrong.
  """
  seeds = seeds or range(len(group_cases.cells(processes)))
  results: list[group_run.Result] = []
  with contextlib.ExitStack() as stack:
    shown = stack.enter_context(bar.bar("striking", len(seeds)))
    strikes = stack.enter_context(group_run.Strikes(folder, processes))
    try:
      for seed in seeds:
        result = strikes.strike(group_cases.case(seed, processes))
        results.append(result)
        shown(len(results))
        for problem in result.problems:
          print(f"seed {seed}, {result.case}: {problem}", flush=True)
      problems = strikes.finish()
    except KeyboardInterrupt:
      raise errors.Interrupted(
        f"interrupted after {len(results)} of {len(seeds)} kills"
      ) from None
  problems += [f"process {pid} is left" for pid in strikes.left()]
  _show(results, processes, strikes.compared)
  for problem in problems:
    print(f"the run: {problem}", flush=True)
  return results, bool(problems)


def _show(
  results: list[group_run.Result], processes: int, compared: int
) -> None:
  cells: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
  for result in results:
    cells[result.case.phase, result.case.who].append(not result.problems)
  every = [
    f"{replica}.{rank}"
    for replica in range(group_cases.REPLICAS)
    for rank in range(processes)
  ]
  shown = tables.table("kills that went well, of all")
  shown.add_column("phase", no_wrap=True)
  for name in every:
    shown.add_column(name, justify="right")
  for phase in group_cases.PHASES:
    found = [cells[phase, name] for name in every]
    if any(found):
      text = [f"{sum(one)}/{len(one)}" if one else "" for one in found]
      shown.add_row(phase, *text)
  tables.show(shown)
  counts = collections.Counter(r.outcome for r in results)
  print(
    f"{len(results)} kills in {sum(r.seconds for r in results):.0f} s:"
    f" {counts['ok']} ok, {counts['hang']} hangs, {counts['wrong']} wrong,"
    f" {counts['not struck']} not struck; {compared:,} fingerprints compared"
  )
  good = [r for r in results if r.back]
  if not good:
    return
  times = {
    "next commit of the other replica": [r.next_commit for r in good],
    "replica back": [sum(r.back.values()) for r in good],
    **{f"  {part}": [r.back[part] for r in good] for part in group_run.PARTS},
  }
  for name, values in times.items():
    print(
      f"{name}: median {statistics.median(values):.3f} s,"
      f" longest {max(values):.3f} s"
    )
