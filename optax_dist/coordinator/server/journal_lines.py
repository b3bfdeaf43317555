"""The coordinator's journal file.

Each line is written at once, after what replicas wait for was sent. A coordinator
that starts again writes first what the last one had no time for.
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import journal_events

_log = logging.getLogger("optax_dist.coordinator")

# Lines that are kept while the file can't be written.
_MOST_WAITING = 256


class JournalLines:
  """Writes what the coordinator notes; a failing file never ends training.

  What can't be written, as on a disk that is full, is tried again with the next
  line. Of what waits too long only the number is written.
  """

  def __init__(
    self,
    path: str,
    describe: Mapping[str, Any],
    commits: Sequence[journal_events.Commit] = (),
  ):
    """Opens the file, if possible, and writes the commits missing from it.

    Args:
      path: the file.
      describe: fields of a run's first line besides its step, from JSON.
      commits: the latest commits of the log.
    """
    self._path = path
    self._describe = describe
    self._file: journal.Journal | None = None
    # Records that are not in the file yet, with the time of this process's clock.
    self._waiting: collections.deque[tuple[float, journal_events.Record]] = (
      collections.deque()
    )
    self._lost = 0
    # When the file could last be written; None while there is no error.
    self._failing: float | None = None
    for commit in commits:
      self._add(commit)
    self._flush()

  def write(self, note: journal_events.Record) -> None:
    """Writes the line of a note."""
    self._add(note)
    self._flush()

  def close(self) -> None:
    """Closes the file."""
    missing = self._lost + len(self._waiting)
    if missing:
      _log.warning("%d lines are missing from the journal.", missing)
    if self._file is not None:
      self._file.close()

  def _add(self, note: journal_events.Record) -> None:
    self._waiting.append((time.monotonic(), note))
    if len(self._waiting) > _MOST_WAITING:
      self._waiting.popleft()
      self._lost += 1

  def _flush(self) -> None:
    """Writes what waits, as far as the file takes it."""
    try:
      if self._file is not None and self._file.is_gone:
        _log.warning(
          "The journal %s was deleted, moved or emptied. The run goes on in a new"
          " file there, without the lines before.",
          self._path,
        )
        self._file.close()
        self._file = None
      if self._file is None:
        self._file = journal.Journal(self._path)
      while self._waiting:
        self._write(self._file, *self._waiting[0])
        self._waiting.popleft()
      if self._failing is not None:
        self._can_write(self._file, self._failing)
    # ValueError: not a valid name; RecursionError: a config of many levels.
    except (OSError, ValueError, RecursionError) as error:
      if self._failing is None:
        self._failing = time.monotonic()
        _log.warning(
          "The journal %s can't be written%s, and training goes on without it, until"
          " it can be: %s",
          *(self._path, "" if self._file is None else " any more"),
          getattr(error, "strerror", None) or error,
        )

  def _can_write(self, file: journal.Journal, since: float) -> None:
    """After a time in which the file could not be written."""
    lost, seconds = self._lost, time.monotonic() - since
    if lost:
      file.write("gap", lines=lost, seconds=round(seconds, 3))
    self._failing, self._lost = None, 0
    _log.warning(
      "The journal is written again after %.1f s; %d lines are missing from it.",
      *(seconds, lost),
    )

  def _write(
    self, file: journal.Journal, since: float, note: journal_events.Record
  ) -> None:
    fields = msgspec.to_builtins(note)
    kind = fields.pop("kind")
    ago = time.monotonic() - since
    if not (file.begun or kind == "run"):
      # The file's earlier lines are gone, and each journal begins with a run.
      file.write("run", ago, **self._describe, step=fields["step"])
    match note:
      case journal_events.Commit():
        missing = note.step - file.step - 1
        if missing < 0:
          return  # The last coordinator has written it.
        if missing and file.step >= 0 and not self._lost:
          # The last coordinator could not write these lines, and the log no longer has
          # their commits.
          file.write("gap", ago, lines=missing)
      case journal_events.Finish() if file.ended:
        return
      case journal_events.Finish():
        fields["load"] = _load()
      case journal_events.Run():
        fields = {**self._describe, "step": note.step}
    file.write(kind, ago, **fields)


def _load() -> float | None:
  """The average number of running or waiting programs in the last minute."""
  try:
    return os.getloadavg()[0]
  except (AttributeError, OSError):  # Not available on every system.
    return None
