"""Reads a journal that is still being written."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator
from typing import IO

from optax_dist.coordinator import journal


class Tail:
  """Returns what was appended since the last call.

  Attributes:
    age: how long the file had not changed when it was last read, in seconds; no
      more than the time between the last two calls, for the clock of another
      host may be wrong.
    bad_lines: how many complete lines could not be read, or are of another version.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
    >>> tail = Tail(path)
    >>> list(tail.read())
    []
    >>> with journal.Journal(path) as written:
    ...   written.write("run", strategy="sync_replicas", step=0)
    ...   [record["kind"] for record in tail.read()]
    ['run']
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Names the file, which need not exist yet."""
    self.path = pathlib.Path(path)
    self._offset = self._inode = 0
    self._read_at: float | None = None
    self.age = 0.0
    self.bad_lines = 0

  def read(self) -> Iterator[journal.Record]:
    """The valid records in complete lines that were not read before, one by one."""
    now = time.monotonic()
    before, self._read_at = self._read_at, now
    try:
      file = self.path.open("rb")
    except FileNotFoundError:
      return iter(())
    stat = os.fstat(file.fileno())
    age = max(0.0, time.time() - stat.st_mtime)
    self.age = age if before is None else min(age, now - before)
    if stat.st_ino != self._inode or stat.st_size < self._offset:
      # The file was replaced, as by a job that was started anew.
      self._offset, self._inode = 0, stat.st_ino
    return self._records(file)

  def _records(self, file: IO[bytes]) -> Iterator[journal.Record]:
    with file:
      file.seek(self._offset)
      for line in file:
        if not line.endswith(b"\n"):
          return  # The line is still being written.
        self._offset += len(line)
        if line.strip():
          record, wrong = journal.parse(line)
          self.bad_lines += bool(wrong)
          if record is not None:
            yield record
