"""The leader's journal file.

Successive leaders append to one file. Each line is written at once; the driver
has sent what other replicas wait for before. A leader that was stopped may
write the line of a step that the next one has written, too: readers take the
first (`journal.Once`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import notes

_log = logging.getLogger("optax_dist.coordinator")


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
        journal.to_json(name, value)
    self._path = path
    self._describe = describe
    self._file: journal.Journal | None = None

  def open(self, commits: Sequence[notes.Commit]) -> None:
    """Opens the file, if possible, and writes the commits missing from it."""
    if self._path is None:
      return
    try:
      self._file = journal.Journal(self._path)
    except (OSError, ValueError) as error:  # ValueError: not a valid name.
      _log.warning(
        "The journal can't be written, and training goes on without it: %s",
        error,
      )
      return
    last = self._file.step
    for commit in commits:
      if commit.step > last:
        self.write(commit)

  def write(self, note: notes.Record) -> None:
    """Writes the line of a note, if there is a journal."""
    if self._file is None:
      return
    fields = msgspec.to_builtins(note)
    kind = fields.pop("kind")
    if isinstance(note, notes.Run):
      fields = {**self._describe, "step": note.step}
    elif isinstance(note, notes.Finish):
      fields["load"] = _load()
    try:
      self._file.write(kind, **fields)
    except OSError as error:
      _log.warning("The journal can't be written any more: %s", error)
      self.close()

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._file.close()
      self._file = None


def _load() -> float | None:
  """The average number of running or waiting programs in the last minute."""
  try:
    return os.getloadavg()[0]
  except (AttributeError, OSError):  # Not available on every system.
    return None
