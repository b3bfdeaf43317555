"""Times two programs in turns, and prints a line for each such comparison."""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

Result = dict[str, Any]


def compare(ours, theirs, rounds: int, calls: int = 1) -> dict[str, float]:
  """Calls both in turns, ``rounds`` times; each waits for its result.

  Args:
    ours: a function of nothing.
    theirs: another.
    rounds: how often to call each.
    calls: how often each does in one call what is timed.

  Returns:
    The medians over the rounds of the ratio of the two times, and of the ratio of
    this process's processor times, the ratio of the two shortest times, and the
    medians in milliseconds.
  """
  for fn in (ours, theirs):
    fn()
    fn()
  times: tuple[list[float], list[float]] = ([], [])
  busy: tuple[list[float], list[float]] = ([], [])
  for i in range(rounds):
    # Neither is always the one that follows the other.
    for which in (0, 1) if i % 2 else (1, 0):
      begin = time.perf_counter(), time.process_time()
      (ours, theirs)[which]()
      times[which].append(time.perf_counter() - begin[0])
      busy[which].append(time.process_time() - begin[1])
  ratio = lambda pairs: statistics.median(
    a / b for a, b in zip(*pairs, strict=True)
  )
  return {
    "ratio": ratio(times),
    # Says more where the machine is busy with other work.
    "ratio_of_processor_time": ratio(busy),
    "ratio_of_shortest": min(times[0]) / min(times[1]),
    "ours_ms": 1e3 / calls * statistics.median(times[0]),
    "theirs_ms": 1e3 / calls * statistics.median(times[1]),
  }


def parser(description: str) -> argparse.ArgumentParser:
  """Returns a parser of ``--quick`` and ``--json``.

  Args:
    description: of the script, in the first of its lines.
  """
  made = argparse.ArgumentParser(description=description.splitlines()[0])
  made.add_argument(
    "--quick", action="store_true", help="fewer rounds: noisy, but soon done"
  )
  made.add_argument(
    "--json", type=pathlib.Path, metavar="FILE", help="also write figures here"
  )
  return made


def report(
  args: argparse.Namespace,
  columns: dict[str, int],
  measures: Iterable[tuple[Callable[[int], Iterable[Result]], int]],
  quick: int,
) -> None:
  """Measures and prints, and writes the figures where the arguments say.

  Args:
    args: those of `parser`.
    columns: what else of a result is in its line, and how wide.
    measures: functions from a number of rounds to results, and this number. A
      result is what `compare` returns, with the columns, a ``goal`` or None, and
      perhaps a ``note``, with which the line ends.
    quick: the number of rounds instead, with ``--quick``.
  """
  names = " ".join(f"{name:<{width}}" for name, width in columns.items())
  print(
    f"{names} {'ratio':>6} {'shortest':>8} {'processor':>9} {'ours/ms':>9}"
    f" {'other/ms':>9}  goal"
  )
  results = []
  for measure, rounds in measures:
    for result in measure(quick if args.quick else rounds):
      print(_line(result, columns), flush=True)
      results.append(result)
  if args.json:
    args.json.write_text(json.dumps(results, indent=2) + "\n")


def _line(result: Result, columns: dict[str, int]) -> str:
  cells = " ".join(
    f"{result[name]:<{width}}" for name, width in columns.items()
  )
  goal = ""
  if result["goal"] is not None:
    met = "met" if result["ratio"] <= result["goal"] else "MISSED"
    goal = f"  <= {result['goal']:.2f} {met}"
  note = f"  {result['note']}" if "note" in result else ""
  return (
    f"{cells} {result['ratio']:6.3f} {result['ratio_of_shortest']:8.3f}"
    f" {result['ratio_of_processor_time']:9.3f} {result['ours_ms']:9.2f}"
    f" {result['theirs_ms']:9.2f}{goal}{note}"
  )
