"""Which lines of the pure core do schedules enter?

python -m tests.simulation.coverage 400
"""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import optax_dist
from tests.simulation import faults, fragments, groups, leases

_ROOT = pathlib.Path(optax_dist.__file__).parent
_PLACES = ("coordinator/protocol", "quorum", "ledger")
_KINDS = (faults, leases, fragments, groups)


def _files() -> list[pathlib.Path]:
  return sorted(f for place in _PLACES for f in (_ROOT / place).rglob("*.py"))


def _lines(code: types.CodeType) -> Iterator[int]:
  """The lines of the functions in some code, but for what defines them."""
  for one in code.co_consts:
    if isinstance(one, types.CodeType):
      if one.co_flags & 2:  # It has local names: a function, not a class.
        first = one.co_firstlineno
        yield from {n for *_, n in one.co_lines() if n and n > first}
      yield from _lines(one)


def entered(schedules: int) -> dict[str, set[int]]:
  """The lines entered by so many schedules of each kind, by file."""
  names = {str(file) for file in _files()}
  found: dict[str, set[int]] = {name: set() for name in names}

  def local(frame: Any, event: str, _: Any) -> Any:
    if event == "line":
      found[frame.f_code.co_filename].add(frame.f_lineno)
    return local

  def trace(frame: Any, event: str, _: Any) -> Any:
    return local if frame.f_code.co_filename in names else None

  sys.settrace(trace)
  try:
    for kind in _KINDS:
      for seed in range(schedules):
        kind.run(kind.schedule(seed))
  finally:
    sys.settrace(None)
  return found


def main() -> int:
  """Prints the share of lines entered, and those that are not."""
  found = entered(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
  whole = missed = 0
  for file in _files():
    text = file.read_text()
    lines = set(_lines(compile(text, str(file), "exec")))
    rest = sorted(lines - found[str(file)])
    whole, missed = whole + len(lines), missed + len(rest)
    for number in rest:
      code = text.splitlines()[number - 1].strip()
      print(f"{file.relative_to(_ROOT)}:{number}: {code}")
  print(f"{whole - missed} of {whole} lines are entered")
  return 0


if __name__ == "__main__":
  sys.exit(main())
