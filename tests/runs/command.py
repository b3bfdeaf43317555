"""The common part of commands that run seeds with real processes."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def seeds(text: str) -> list[int]:
  """An argument type: seeds and ranges of them.

  Example:
    >>> seeds("3,8,20:23")
    [3, 8, 20, 21, 22]
  """
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
  add("--seeds", metavar="FIRST:END", type=seeds, help="default: the first 50")
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help="keep journals and outputs there (default: nowhere)",
  )
  return made


@contextlib.contextmanager
def folder(output: pathlib.Path | None) -> Iterator[pathlib.Path]:
  """The folder for outputs: a temporary one by default."""
  with tempfile.TemporaryDirectory() as temporary:
    result = output or pathlib.Path(temporary)
    result.mkdir(parents=True, exist_ok=True)
    yield result


def run_all(
  cases: Sequence[Any],
  run: Callable[[Any], Any],
  describe: Callable[[Any], str],
) -> list[Any]:
  """Runs one case after another, until Ctrl-C, with a line for each.

  Args:
    cases: what to run; each has a seed.
    run: of a case; returns a result, with seconds and problems.
    describe: says what there is in a result.
  """
  results: list[Any] = []
  try:
    for case in cases:
      result = run(case)
      results.append(result)
      print(
        f"seed {case.seed}, {case}: {describe(result)}, in"
        f" {result.seconds:.0f} s, {'; '.join(result.problems) or 'ok'}",
        flush=True,
      )
  except KeyboardInterrupt:
    print(f"interrupted after {len(results)} of {len(cases)} runs")
  return results
