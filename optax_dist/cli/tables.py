"""Tables on standard output, as all commands print them."""

from __future__ import annotations

import rich.box
import rich.console
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


def show(shown: rich.table.Table) -> None:
  """Prints it to standard output."""
  console = rich.console.Console(highlight=False)
  if not console.is_terminal:
    console.width = _WIDTH
  console.print(shown, crop=False)
