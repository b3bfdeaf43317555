"""The output of a launch: labelled lines, and on a terminal a live table."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
from typing import Any


class Shown:
  """Shows the replicas' output; a context manager.

  Attributes:
    journal: path of the run's journal; None for none.
  """

  def __init__(self, journal: pathlib.Path | None, needed: bool = False):
    """Sets the journal.

    Args:
      journal: the file, if it is to be kept.
      needed: whether there must be one in any case.
    """
    self.journal, self._needed = journal, needed
    self._stack = contextlib.ExitStack()
    self._live: Any = None

  def __enter__(self) -> Shown:
    if self._needed:
      self._find_journal()
    if sys.stderr.isatty():
      # Without rich, or a folder for the journal: lines.
      with contextlib.suppress(ModuleNotFoundError, FileNotFoundError):
        from optax_dist.cli.runs import table

        live = table.Live(self._find_journal(), from_end=True)
        self._live = self._stack.enter_context(live)
    return self

  def _find_journal(self) -> pathlib.Path:
    if self.journal is None:
      folder = self._stack.enter_context(tempfile.TemporaryDirectory())
      self.journal = pathlib.Path(folder, "journal.jsonl")
    return self.journal

  def __exit__(self, *exception: Any) -> None:
    self._stack.__exit__(*exception)

  def echo(self, label: str, line: str, error: bool) -> None:
    """Prints a line of a replica."""
    from optax_dist.coordinator.launch import output

    if self._live is None:
      output.echo(label, line, error)
    else:
      self._live.print_above(f"[{label}] {line}")

  def update(self) -> None:
    """Shows recent events."""
    if self._live is not None:
      self._live.update()
