"""Which lines of the pure core do schedules enter? Needs Python 3.12.

python -m tests.simulation.coverage 250

`unentered.txt` says why a line stays that no schedule enters: for a line, for a
function, or for a whole file. A line without a reason is an error, and so is a
reason for what is entered by now, but for what is entered rarely.
"""

from __future__ import annotations

import ast
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import optax_dist
from tests.simulation import (
  faults,
  fragments,
  groups,
  leases,
  planted,
  planted_faults,
  slots,
)

_ROOT = pathlib.Path(optax_dist.__file__).parent
_EXTRAS = "coordinator/extras"
_PLACES = (
  "coordinator/protocol/**/*.py",
  f"{_EXTRAS}/groups/companion.py",
  f"{_EXTRAS}/groups/orders.py",
  f"{_EXTRAS}/groups/speaker.py",
  f"{_EXTRAS}/decoupled_diloco/rounds.py",
  "quorum/*.py",
  "ledger/*.py",
)
_KINDS = (faults, leases, slots, fragments, groups)
# How the reason begins of what schedules may enter or not.
_RARELY = "Rarely"
_REASONS = pathlib.Path(__file__).with_name("unentered.txt")


def files() -> list[pathlib.Path]:
  """The files of the pure core."""
  return sorted(file for place in _PLACES for file in _ROOT.glob(place))


def reasons() -> dict[str, str]:
  """Why places stay that no schedule enters."""
  found, reason = {}, ""
  for line in _REASONS.read_text().splitlines():
    if line.startswith("#"):
      reason = line[1:].strip()
    elif line.strip():
      found[line.strip()] = reason
  return found


def _lines(code: types.CodeType) -> Iterator[int]:
  """The lines of the functions in some code, but for what defines them."""
  for one in code.co_consts:
    if isinstance(one, types.CodeType):
      if one.co_flags & 2:  # It has local names: a function, not a class.
        first = one.co_firstlineno
        yield from {n for *_, n in one.co_lines() if n and n > first}
      yield from _lines(one)


def statements(text: str) -> dict[int, tuple[str, str]]:
  """Each line's function, and the first line of its statement.

  Errors for what callers do wrong are left out.
  """
  found: dict[int, tuple[str, str]] = {}
  lines = text.splitlines()

  def visit(node: ast.AST, where: str) -> None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      where = f"{where}.{node.name}" if where else node.name
    if isinstance(node, ast.match_case):
      first, last = node.pattern.lineno, node.body[0].lineno - 1
    elif isinstance(node, ast.stmt):
      first, last = node.lineno, node.end_lineno or node.lineno
    else:
      first, last = 0, -1
    for number in range(first, last + 1):
      found[number] = (where, lines[first - 1].strip())
    for child in ast.iter_child_nodes(node):
      visit(child, where)
    unmet = isinstance(node, ast.Raise) or "assert_never" in (
      ast.unparse(node) if isinstance(node, ast.match_case) else ""
    )
    if unmet and last >= 0:
      end = getattr(node, "end_lineno", None) or node.body[-1].end_lineno
      for number in range(first, end + 1):
        found.pop(number, None)

  visit(ast.parse(text), "")
  return found


def places(file: pathlib.Path) -> dict[int, set[str]]:
  """By what names `unentered.txt` may give a reason for each line of a file."""
  text, name = file.read_text(), str(file.relative_to(_ROOT))
  known = statements(text)
  return {
    number: {
      name,
      f"{name}: {known[number][0]}()",
      f"{name}: {known[number][0]}: {known[number][1]}",
    }
    for number in _lines(compile(text, str(file), "exec"))
    if number in known
  }


def gone() -> list[str]:
  """What `unentered.txt` names and is not there any more."""
  there = {
    name for file in files() for s in places(file).values() for name in s
  }
  return sorted(reasons().keys() - there)


def _schedules(count: int) -> Iterator[tuple[Any, int]]:
  """The first schedules of each kind, and those that find planted faults."""
  for kind in _KINDS:
    for seed in range(count):
      yield kind, seed
  seeds = planted.recorded_seeds()
  for fault in planted_faults.FAULTS:
    if fault.name in seeds:
      yield fault.kind, seeds[fault.name]


def entered(schedules: int) -> dict[str, set[int]]:
  """The lines entered by schedules of each kind, by file.

  Args:
    schedules: how many of each kind.
  """
  found: dict[str, set[int]] = {str(file): set() for file in files()}
  monitoring = sys.monitoring

  def line(code: types.CodeType, number: int) -> Any:
    if code.co_filename in found:
      found[code.co_filename].add(number)
    return monitoring.DISABLE  # Once is enough.

  monitoring.use_tool_id(monitoring.COVERAGE_ID, "schedules")
  monitoring.register_callback(
    monitoring.COVERAGE_ID, monitoring.events.LINE, line
  )
  monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
  for kind, seed in _schedules(schedules):
    kind.run(kind.schedule(seed))
  monitoring.free_tool_id(monitoring.COVERAGE_ID)
  return found


def main() -> int:
  """Prints the share of lines entered, and those not entered for no reason."""
  if sys.version_info < (3, 12):
    sys.exit("Python 3.12 or later is needed, which says once of each line.")
  found = entered(int(sys.argv[1]) if len(sys.argv) > 1 else 250)
  known = reasons()
  used: set[str] = set()
  there: set[str] = set()
  whole = missed = unknown = 0
  for file in files():
    lines = places(file)
    rest = lines.keys() - found[str(file)]
    whole, missed = whole + len(lines), missed + len(rest)
    for number, names in sorted(lines.items()):
      there |= names
      if number not in rest:
        continue
      used |= names & known.keys()
      if not names & known.keys():
        unknown += 1
        print(f"line {number}: {max(names, key=len)}")
  rare = {place for place in there if known.get(place, "").startswith(_RARELY)}
  stale = sorted(known.keys() - used - rare)
  for place in stale:
    print(f"{place} is entered by now, or there no more")
  print(
    f"{whole - missed} of {whole} lines are entered; of the others, "
    f"{missed - unknown} stay for a reason"
  )
  return int(bool(unknown or stale))


if __name__ == "__main__":
  sys.exit(main())
