"""Tables on standard output, in the style of all commands."""

from __future__ import annotations

from typing import Any

import rich.box
import rich.console
import rich.measure
import rich.table

_WIDTH = 140  # If there is no terminal.


def table(title: str) -> rich.table.Table:
  """Creates an empty table."""
  return rich.table.Table(
    title=title,
    title_justify="left",
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    collapse_padding=True,
  )


def plain(**options: Any) -> rich.console.Console:
  """A console that shows text as it is: paths and reasons may have brackets."""
  return rich.console.Console(
    highlight=False, markup=False, emoji=False, **options
  )


def width() -> int:
  """The line width of standard output, in characters."""
  console = rich.console.Console()
  return console.width if console.is_terminal else _WIDTH


def show(shown: rich.table.Table) -> None:
  """Prints the table; row by row if the terminal is too narrow."""
  console = plain(width=width())
  # Rich limits its measurements to the available width.
  wide = console.options.update(width=_WIDTH)
  needs = rich.measure.Measurement.get(console, wide, shown).maximum
  if needs > console.width:
    _show_rows(console, shown)
  else:
    console.print(shown, crop=False)


def _show_rows(console: rich.console.Console, shown: rich.table.Table) -> None:
  """Prints each row as a block, with one cell per line."""
  if shown.title:
    console.print(shown.title, style="table.title")
  names = [str(column.header) for column in shown.columns]
  longest = max(map(len, names))
  for row in zip(*(column.cells for column in shown.columns), strict=True):
    console.print(f"{names[0]} {row[0]}", style="bold")
    for name, cell in zip(names[1:], row[1:], strict=True):
      console.print(f"  {name:<{longest}}  {cell}", soft_wrap=True)
