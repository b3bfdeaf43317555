"""Tables as text, in the style of all commands."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from optax_dist.cli import parser

_WIDTH = 140  # If there is no terminal.


def text(
  title: str,
  names: Sequence[str],
  rows: Sequence[Mapping[str, str]],
  words: Collection[str] = (),
) -> str:
  """A table for a terminal; columns of numbers are aligned at the right.

  Args:
    title: its first line.
    names: of the columns.
    rows: by the name of the column, the texts of a row.
    words: columns of words, which are aligned at the left.

  Example:
    >>> rows = [{"of": "all", "steps": "12"}, {"of": "one", "steps": "7"}]
    >>> print(text("a run", ["of", "steps"], rows, words=["of"]))
    a run
    of   steps
    ----------
    all     12
    one      7
  """
  every = [
    {name: parser.plain(row[name]) for name in names}
    for row in [dict(zip(names, names, strict=True)), *rows]
  ]
  widths = {name: max(len(row[name]) for row in every) for name in names}
  lines = [
    "  ".join(
      row[name].ljust(width) if name in words else row[name].rjust(width)
      for name, width in widths.items()
    ).rstrip()
    for row in every
  ]
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join([parser.plain(title), *lines])


def width(stream: IO[str]) -> int:
  """The width of a terminal, in characters; 140 if the stream is none."""
  try:
    return os.get_terminal_size(stream.fileno()).columns or _WIDTH
  except (OSError, ValueError):
    return _WIDTH
