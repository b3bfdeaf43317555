"""The leader's journal file.

    notes.Note  ->  Records.make  ->  record  ->  journal.Journal

Successive leaders append to one file. Each line is written at once; the driver
has sent what other replicas wait for before. A leader that was stopped may
write the line of a step that the next one has written, too: readers take the
first (`journal.Once`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries, notes
from optax_dist.coordinator.runtime import records

_log = logging.getLogger("optax_dist.coordinator")
# Unlike msgspec it writes any text and whole number that a member may report.
_encode = json.JSONEncoder(allow_nan=False, default=str).encode


class JournalLines:
  """Writes what the leader notes; a failing file never ends training."""

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    describe: Mapping[str, Any],
  ):
    """Creates the writer, without opening the file.

    Args:
      path: the file; None for no journal.
      describe: fields of a run's first line besides its step.

    Raises:
      ValueError: a field is not a JSON value.
    """
    if path is not None:
      # Otherwise it would fail in the leader's event loop, and end the run.
      for name, value in describe.items():
        journal.check_json(name, value)
    self._path = path
    self._records = records.Records(describe)
    self._file: journal.Journal | None = None

  def open(self, commits: Sequence[entries.Committed]) -> None:
    """Opens the file, if possible, and writes the commits missing from it."""
    if self._path is None:
      return
    found = self._open(self._path)
    if self._file is None:
      return
    last = -1
    for record in found:
      if record["kind"] == "run":
        last = record["step"] - 1
      elif record["kind"] == "commit":
        last = record["step"]
    for commit in commits:
      if commit.attempt.step > last:
        self.write(notes.StepCommitted(commit, None))

  def _open(self, path: str | os.PathLike[str]) -> list[journal.Record]:
    """Opens the file; returns its records."""
    try:
      self._file = journal.Journal(path)
      return journal.read(path).records
    except (OSError, ValueError) as error:  # ValueError: not a valid name.
      _log.warning(
        "The journal can't be written, and training goes on without it: %s",
        error,
      )
      self.close()
      return []

  def write(self, note: notes.Note) -> None:
    """Writes the line of a note, if there is a journal."""
    if self._file is None:
      return
    record = self._records.make(note, self._file.time())
    try:
      if isinstance(note, notes.RunBegins):
        # The caller's config may have arrays; and the file's time restarts.
        fields = record | {"time": 0.0}
        self._file.write(fields.pop("kind"), **fields)
      else:
        self._file.append(_encode(record))
    except OSError as error:
      _log.warning("The journal can't be written any more: %s", error)
      self.close()

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._file.close()
      self._file = None
