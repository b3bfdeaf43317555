"""Tables on standard output, as all commands print them."""

from __future__ import annotations

import rich.box
import rich.console
import rich.measure
import rich.table

_WIDTH = 140  # Off a terminal.


def table(title: str) -> rich.table.Table:
  """An empty table."""
  return rich.table.Table(
    title=title,
    title_justify="left",
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    collapse_padding=True,
  )


def width() -> int:
  """Characters in a line of standard output."""
  console = rich.console.Console()
  return console.width if console.is_terminal else _WIDTH


def show(shown: rich.table.Table) -> None:
  """Prints it to standard output; row by row where a terminal is too narrow."""
  console = rich.console.Console(highlight=False, width=width())
  # Rich counts no more than the width there is.
  wide = console.options.update(width=_WIDTH)
  needs = rich.measure.Measurement.get(console, wide, shown).maximum
  if needs > console.width:
    _show_rows(console, shown)
  else:
    console.print(shown, crop=False)


def _show_rows(console: rich.console.Console, shown: rich.table.Table) -> None:
  """Prints each row as a block: its first cell, then a line for each other."""
  if shown.title:
    console.print(shown.title, style="table.title")
  names = [str(column.header) for column in shown.columns]
  longest = max(map(len, names))
  for row in zip(*(column.cells for column in shown.columns), strict=True):
    console.print(f"{names[0]} {row[0]}", style="bold")
    for name, cell in zip(names[1:], row[1:], strict=True):
      console.print(f"  {name:<{longest}}  {cell}", soft_wrap=True)
