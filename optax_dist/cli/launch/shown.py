"""What a launch shows: lines, a live table on a terminal, a page, event files."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
from typing import Any

from optax_dist.cli import errors, parser


class Shown:
  """Shows the replicas' output and the run; a context manager.

  Attributes:
    journal: path of the run's journal; None for none.
  """

  def __init__(
    self,
    journal: pathlib.Path | None,
    web: tuple[str, int] | None = None,
    tensorboard: pathlib.Path | None = None,
  ):
    """Sets what is shown.

    Args:
      journal: the file, if it is to be kept.
      web: address and port of the run's page; None for none.
      tensorboard: folder for event files; None for none.
    """
    self.journal, self._web, self._folder = journal, web, tensorboard
    self._stack = contextlib.ExitStack()
    self._live: Any = None
    self._points: Any = None

  def __enter__(self) -> Shown:
    with self._stack as stack:  # It closes what is open if the rest fails.
      if self._web is not None:
        self._serve(*self._web)
      if self._folder is not None:
        self._write_points(self._folder)
      if sys.stderr.isatty():
        # Without rich, or a folder for the journal: lines.
        with contextlib.suppress(ModuleNotFoundError, FileNotFoundError):
          from optax_dist.cli.runs import table

          live = table.Live(self._find_journal(), from_end=True)
          self._live = stack.enter_context(live)
      self._stack = stack.pop_all()
    return self

  def _serve(self, bind: str, port: int) -> None:
    from optax_dist.cli.runs.web import server
    from optax_dist.coordinator import journal_tail

    tail = journal_tail.Tail(self._find_journal())
    page = server.Server(tail, bind, port)
    self._stack.callback(page.close)
    parser.say(f"serving {page.url} and {page.metrics_url}")

  def _write_points(self, folder: pathlib.Path) -> None:
    from optax_dist.coordinator.metrics import tensorboard

    try:
      self._points = tensorboard.Points(self._find_journal(), folder)
    except OSError as error:
      raise errors.CommandError(f"--tensorboard: {error.strerror}") from error
    self._stack.callback(self._points.close)

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
    if self._points is not None:
      self._points.update()
