"""Tables on standard output, in the style of all commands."""

from __future__ import annotations

from typing import Any

import rich.box
import rich.console
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
  """Prints the table; in a narrow terminal, cells take several lines."""
  for column in shown.columns:
    column.overflow = "fold"
  plain(width=width()).print(shown)
