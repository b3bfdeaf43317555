"""What is seen of a launch: labelled lines, and on a terminal a live table."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
from typing import Any


class Shown:
  """Shows what replicas print; enter it as a context.

  Attributes:
    journal: where the run's journal goes; None for nowhere.
  """

  def __init__(self, journal: pathlib.Path | None, needed: bool = False):
    """Names the journal, if it is to be kept.

    Args:
      journal: the file.
      needed: whether there is to be one in any case.
    """
    self.journal, self._needed = journal, needed
    self._stack = contextlib.ExitStack()
    self._live: Any = None

  def __enter__(self) -> Shown:
    if self._needed:
      self._find_journal()
    if sys.stderr.isatty():
      with contextlib.suppress(ModuleNotFoundError):  # Without rich: lines.
        from optax_dist.cli.runs import table

        live = table.Live(self._find_journal())
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
    """Shows what has happened since."""
    if self._live is not None:
      self._live.update()
