"""The coordinator's log, as a file that only grows.

    magic, format                        one line of text
    length, checksum, record             each as it was decided
    ...

A record is written with one call, so a process that is killed leaves a whole record
or the beginning of one, which the next coordinator cuts off. Steps are not synced to
the disk: what the host's power takes away of them, members bring back
(`entries.Recovered`). All else is, for no number may be given twice.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import struct
import time
import zlib
from typing import Protocol

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import (
  RECORDS,
  Committed,
  Record,
)
from optax_dist.coordinator.protocol.history import History

_MAGIC = b"optax-dist log, format 1\n"
_HEAD = struct.Struct("<II")  # Length and checksum of the record.
# Bytes after which the log is written anew, as one record.
_LARGE = 64 << 20
# Seconds after which a log that belongs to a port is that of an earlier job.
_OLD = 600.0
# Seconds between two attempts to write a log that could not be written.
_PAUSE = 5.0


class LogError(RuntimeError):
  """The log can't be used; the message says why, and what to do."""


class Log(Protocol):
  """What a coordinator needs of its log."""

  def read(self) -> History:
    """What it says."""
    ...

  def append(self, record: Record, history: History) -> str:
    """Writes a record; returns what went wrong, "" for nothing.

    Args:
      record: the record.
      history: what the log says with it.

    Raises:
      LogError: another coordinator may write it, so this one must end.
    """
    ...

  def close(self) -> None:
    """Closes it."""
    ...


class MemoryLog:
  """A log that ends with its process: that of replicas in threads."""

  def read(self) -> History:
    """Nothing was written before."""
    return History()

  def append(self, record: Record, history: History) -> str:
    """Keeps nothing: `history` has it."""
    return ""

  def close(self) -> None:
    """Does nothing."""


class FileLog:
  """A log in a file, which one process at a time may have."""

  def __init__(self, path: str | os.PathLike[str]):
    """Locks the file; it is created if there is none.

    Raises:
      LogError: another process has it, or it can't be read or written.
    """
    self.path = pathlib.Path(path)
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
      raise LogError(f"The log can't be written: {error}.") from None
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      holder = os.pread(self._lock, 64, 0).decode(errors="replace") or "unknown"
      os.close(self._lock)
      raise LogError(
        f"Another coordinator has the log {self.path}: process {holder}."
      ) from None
    try:
      os.ftruncate(self._lock, 0)
      os.pwrite(self._lock, str(os.getpid()).encode(), 0)
      flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
      self._file = os.open(self.path, flags, 0o600)
    except OSError as error:
      os.close(self._lock)
      raise LogError(f"The log can't be written: {error}.") from None
    self._size = 0
    # Why it can't be written at present, and when to try again.
    self._trouble, self._retry_at = "", 0.0

  def read(self) -> History:
    """What it says; a last record that was cut short is cut off.

    Raises:
      LogError: it is no log of this version, or is damaged.
    """
    data = self.path.read_bytes()
    history = History()
    if not data or _MAGIC.startswith(data):
      try:
        os.ftruncate(self._file, 0)
        self._write(self._file, _MAGIC)
      except OSError as error:
        raise LogError(f"The log can't be written: {error}.") from None
      return history
    if not data.startswith(_MAGIC):
      raise LogError(
        f"{self.path} is no log of this version: it begins with {data[:24]!r}."
        " Give the run a log of its own."
      )
    at = len(_MAGIC)
    while at < len(data):
      record, end = self._record(data, at)
      if record is None:
        break
      try:
        history.apply(record)
      except ValueError as error:
        raise LogError(f"The log {self.path} is damaged: {error}.") from None
      at = end
    if at < len(data):
      os.ftruncate(self._file, at)
    self._size = at
    return history

  def _record(self, data: bytes, at: int) -> tuple[Record | None, int]:
    """The record at a position, and the next one's; None if it is cut short."""
    start = at + _HEAD.size
    if start > len(data):
      return None, at
    length, checksum = _HEAD.unpack_from(data, at)
    end = start + length
    if end > len(data):
      return None, at
    raw = data[start:end]
    if zlib.crc32(raw) != checksum:
      if end == len(data):
        return None, at
      raise LogError(
        f"The log {self.path} is damaged at byte {at}: the checksum of a record is"
        " wrong. Resume from a checkpoint, with a log of its own."
      )
    try:
      return RECORDS.decode(raw), end
    except codec.BadMessage as error:
      raise LogError(
        f"The log {self.path} has a record that this version can't read ({error})."
        " Continue with the version that wrote it, or resume from a checkpoint,"
        " with a log of its own."
      ) from None

  def append(self, record: Record, history: History) -> str:
    """Writes a record, or all of it anew once it is large.

    If the file can't be written, the run goes on, and a coordinator that starts
    again is told by its members what is missing.
    """
    if self._trouble:
      return self._write_anew(history, retry=True)
    try:
      self._write(self._file, _framed(record))
      if not all(isinstance(entry, Committed) for entry in record.entries):
        os.fsync(self._file)
    except OSError as error:
      self._trouble, self._retry_at = str(error), time.monotonic() + _PAUSE
      return self._trouble
    if self._size > _LARGE:
      return self._write_anew(history, retry=False)
    return ""

  def _write(self, file: int, data: bytes) -> None:
    written = os.write(file, data)
    if written < len(data):
      # The disk is full: no half of a record may precede another one.
      os.ftruncate(file, self._size)
      raise OSError(28, "No space left on device")
    self._size += written

  def _write_anew(self, history: History, retry: bool) -> str:
    """Writes one record of all that was decided, in place of all others."""
    if retry and time.monotonic() < self._retry_at:
      return self._trouble
    new = self.path.with_name(f"{self.path.name}.new")
    data = _MAGIC + _framed(Record((history.compacted(),)))
    try:
      flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
      file = os.open(new, flags, 0o600)
      try:
        if os.write(file, data) < len(data):
          raise OSError(28, "No space left on device")
        os.fsync(file)
        os.replace(new, self.path)
      except BaseException:
        os.close(file)
        raise
    except OSError as error:
      if retry:
        self._trouble, self._retry_at = str(error), time.monotonic() + _PAUSE
        return self._trouble
      return ""  # The old one is still there, and good.
    os.close(self._file)
    self._file, self._size, self._trouble = file, len(data), ""
    return ""

  def close(self) -> None:
    """Closes the file, for another process to continue it."""
    os.close(self._file)
    os.close(self._lock)


def _framed(record: Record) -> bytes:
  raw = RECORDS.encode(record)
  return _HEAD.pack(len(raw), zlib.crc32(raw)) + raw


def forget_if_old(path: str | os.PathLike[str]) -> None:
  """Deletes a log that nobody has, and nobody wrote for a while.

  That of a port is found by whatever job uses the port next.
  """
  try:
    if time.time() - os.stat(path).st_mtime < _OLD:
      return
    FileLog(path).close()
    os.unlink(path)
  except (OSError, LogError):
    pass  # There is none, or it is in use.


def forget(path: pathlib.Path) -> None:
  """Deletes a log that nobody has, and those of named runs beside it.

  Raises:
    LogError: a coordinator has it.
  """
  for one in (path, *path.parent.glob(f"{path.name}.????????????????")):
    if one.exists():
      FileLog(one).close()
      one.unlink(missing_ok=True)


def goes_on(path: pathlib.Path, replicas: int) -> bool:
  """Whether a log has a run of so many replicas that has not ended.

  Raises:
    LogError: it can't be continued.
  """
  if not path.exists():
    return False
  log = FileLog(path)
  try:
    said = log.read()
  finally:
    log.close()
  return (
    said.job is not None
    and said.ended is None
    and said.job.rules.total_num_replicas == replicas
  )
