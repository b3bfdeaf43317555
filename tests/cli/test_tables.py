"""Tables on standard output."""

import functools
import io
import itertools
import re

import rich.console

from optax_dist.cli import tables


def test_a_wide_row_is_one_line_where_nobody_looks(capsys):
  shown = tables.table("wide")
  cells = [f"column-{i:02}" for i in range(11)]
  for cell in cells:
    shown.add_column(cell)
  shown.add_row(*cells)
  tables.show(shown)
  title, *lines = capsys.readouterr().out.splitlines()
  assert title.rstrip() == "wide"
  assert [line.split() for line in lines if "column-00" in line] == [cells] * 2


def test_a_narrow_terminal_loses_nothing(monkeypatch):
  """No number becomes `0...`: a cell takes several lines."""
  out = io.StringIO()
  terminal = functools.partial(
    rich.console.Console,
    file=out,
    width=60,
    force_terminal=True,
    color_system=None,
  )
  monkeypatch.setattr(rich.console, "Console", terminal)
  shown = tables.table("wide")
  for i in range(9):
    shown.add_column(f"column {i}")
  shown.add_row(*(f"{i}.12345678" for i in range(9)))
  tables.show(shown)
  printed = out.getvalue()
  _, cells = printed.rsplit("\N{BOX DRAWINGS LIGHT HORIZONTAL}", 1)
  first, *more = cells.splitlines()[1:]
  starts = [match.start() for match in re.finditer(r"\S+", first)]
  for i, (start, end) in enumerate(itertools.pairwise([*starts, 60])):
    found = "".join(line[start:end].strip() for line in (first, *more))
    assert found == f"{i}.12345678"
  assert "\N{HORIZONTAL ELLIPSIS}" not in printed
  assert max(map(len, printed.splitlines())) <= 60


def test_text_with_brackets_is_shown_as_it_is(capsys):
  """Paths, and the reason for which a run ended, are no markup."""
  text = "[/a]  [bold]  :fire:"
  shown = tables.table(text)
  shown.add_column(text)
  shown.add_row(text)
  tables.show(shown)
  out = capsys.readouterr().out
  assert out.count(text) == 3
