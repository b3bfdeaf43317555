"""The leader's journal file, and whoever observes the run.

    notes.Note  ->  Records.make  ->  record  ->  journal.Journal
                                              ->  Observer

Successive leaders append to one file. Each line is written at once; the driver
has sent what other replicas wait for before. A leader that was stopped may
write the line of a step that the next one has written, too: readers take the
first (`journal.Once`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries, notes
from optax_dist.coordinator.runtime import records

_log = logging.getLogger("optax_dist.coordinator")
# Unlike msgspec it writes any text and whole number that a member may report.
_encode = json.JSONEncoder(allow_nan=False, default=str).encode


class Observer(Protocol):
  """Receives the leader's notes in the journal's form."""

  def begin(self, owner: object, records: Iterable[journal.Record]) -> None:
    """The owner leads from now on; the records are earlier ones, if known."""
    ...

  def take(self, record: journal.Record) -> None:
    """Takes the record of an event."""
    ...

  def end(self, owner: object) -> None:
    """The owner no longer leads."""
    ...


class JournalLines:
  """Writes what the leader notes; a failing file never ends training."""

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    describe: Mapping[str, Any],
    silences: Callable[[], Mapping[str, float]] = dict,
    observer: Observer | None = None,
  ):
    """Creates the writer, without opening the file.

    Args:
      path: the file; None for no journal.
      describe: fields of a run's first line besides its step.
      silences: how long each process may currently be silent.
      observer: receives the same records.

    Raises:
      ValueError: a field is not a JSON value.
    """
    if path is not None:
      # Otherwise it would fail in the leader's event loop, and end the run.
      for name, value in describe.items():
        journal.check_json(name, value)
    self._path, self._observer = path, observer
    self._records = records.Records(describe, silences)
    self._file: journal.Journal | None = None
    self._start = time.monotonic()

  def open(self, commits: Sequence[entries.Committed]) -> None:
    """Opens the file, if possible, and writes the commits missing from it."""
    found: list[journal.Record] = []
    if self._path is not None:
      found = self._open(self._path)
    if self._observer is not None:
      self._observer.begin(self, found)
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
      self._close_file()
      return []

  def write(self, note: notes.Note) -> None:
    """Writes the line of a note, if there is a journal or an observer."""
    if self._file is None and self._observer is None:
      return
    if isinstance(note, notes.RunBegins):
      self._start = time.monotonic()
    record = self._records.make(note, self._time(note))
    if record is None:
      return
    if self._observer is not None:
      self._observer.take(record)
    if self._file is None:
      return
    try:
      if isinstance(note, notes.RunBegins):
        # The caller's config may have arrays; and the file's time restarts.
        fields = {key: x for key, x in record.items() if key != "kind"}
        self._file.write("run", **fields)
      else:
        self._file.append(_encode(record))
    except OSError as error:
      _log.warning("The journal can't be written any more: %s", error)
      self._close_file()

  def _time(self, note: notes.Note) -> float:
    """Seconds since the run's start."""
    if isinstance(note, notes.RunBegins):
      return 0.0
    if self._file is not None:
      return self._file.time()
    return time.monotonic() - self._start

  def close(self) -> None:
    """Closes the file."""
    if self._observer is not None:
      self._observer.end(self)
    self._close_file()

  def _close_file(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None
