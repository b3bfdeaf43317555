"""The coordinator's log: records, in a file that only grows or in etcd.

    magic, format                        one line of text
    length, checksums, record            each as it was decided
    ...

A record is written with one call, so a process that is killed leaves a whole record
or the beginning of one, and a host without power perhaps zeros: the next coordinator
cuts that off. Steps are not synced to the disk: if the host's power takes some away,
the run begins again from the newest state of its members. All else is, for no number
may be given twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from optax_dist.coordinator._internal import files, locks
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import (
  RECORDS,
  Committed,
  Record,
)
from optax_dist.coordinator.protocol.history import History

_MAGIC = b"optax-dist log, format 3\n"
# Length and checksum of the record, and the checksum of these two.
_HEAD, _SUM = struct.Struct("<II"), struct.Struct("<I")
# Bytes after which the log is written anew, as one record.
_LARGE = 64 << 20
#: Seconds after which a log that belongs to a port is that of an earlier job.
OLD = 600.0
# Seconds between two attempts to write a log that could not be written.
_RETRY_SECONDS = 5.0


class LogError(RuntimeError):
  """The log can't be used; the message says why, and what to do."""


class Records(Protocol):
  """Where records are kept; `str` names it."""

  @property
  def is_long(self) -> bool:
    """Whether one record should take the place of all."""
    ...

  def read(self) -> Iterable[bytes]:
    """All records, in order, but for a last one that is not whole.

    Raises:
      LogError: they are damaged.
    """
    ...

  def append(self, record: bytes, durable: bool) -> None:
    """Writes a record.

    Args:
      record: the record.
      durable: whether it must survive that the host loses its power.

    Raises:
      OSError: it can't be written at present.
      LogError: another coordinator may write here, so this one must end.
    """
    ...

  def replace(self, record: bytes) -> None:
    """Writes a record in place of all before; raises as `append` does."""
    ...

  def close(self) -> None:
    """Closes it, for another process to continue it."""
    ...


class Log:
  """A coordinator's decisions.

  If the log can't be written, the run goes on; a coordinator that starts again finds
  from its members' calls that steps are missing.
  """

  def __init__(self, records: Records | None):
    """Reads and writes nothing yet.

    Args:
      records: where they are kept; None for a log that ends with its process.
    """
    self._records = records
    # Why it can't be written at present, and when to try again.
    self._trouble, self._retry_at = "", 0.0

  @property
  def is_kept(self) -> bool:
    """Whether the log stays after this process has closed it."""
    return self._records is not None

  def read(self) -> History:
    """Reads the log.

    Raises:
      LogError: it is no log of this version and job, or is damaged.
    """
    history = History()
    try:
      for raw in () if self._records is None else self._records.read():
        history.apply(RECORDS.decode(raw))
    except codec.BadMessage as error:
      raise LogError(
        f"The log {self._records} has a record that this version can't read"
        f" ({error}). Continue with the version that wrote it, or resume from a"
        " checkpoint, with a log of its own."
      ) from None
    except ValueError as error:
      raise LogError(
        f"The log {self._records} is damaged: {error}. Resume from a checkpoint,"
        " with a log of its own."
      ) from None
    return history

  def append(self, record: Record, history: History) -> str:
    """Writes a record; once the log is long, replaces it by a compacted one.

    Args:
      record: the record.
      history: all decisions, including this record.

    Returns:
      Why the record could not be written; "" if it was.

    Raises:
      LogError: another coordinator may write it, so this one must end.
    """
    if self._records is None:
      return ""
    if self._trouble and time.monotonic() < self._retry_at:
      return self._trouble
    whole = lambda: RECORDS.encode(Record((history.compacted(),)))
    try:
      if self._trouble:
        self._records.replace(whole())
      else:
        steps = all(isinstance(entry, Committed) for entry in record.entries)
        self._records.append(RECORDS.encode(record), durable=not steps)
    except OSError as error:
      self._trouble = f"{self._records}: {_why(error, self._records)}"
      self._retry_at = time.monotonic() + _RETRY_SECONDS
      return self._trouble
    self._trouble = ""
    if self._records.is_long:
      with contextlib.suppress(OSError):  # Otherwise the long log stays.
        self._records.replace(whole())
    return ""

  def close(self) -> None:
    """Closes it, for another process to continue it."""
    if self._records is not None:
      self._records.close()


class FileRecords:
  """Records in a file, which one process at a time may have."""

  def __init__(self, path: str | os.PathLike[str]):
    """Locks the file; it is created if there is none.

    Raises:
      LogError: another process has it, or it can't be read or written.
    """
    # Links are resolved: under two names, two coordinators could lock the same log.
    self.path = pathlib.Path(os.path.realpath(path))
    self._size, self._limit = 0, _LARGE
    with contextlib.ExitStack() as stack, _as_log_error(self.path):
      files.check_regular(self.path)
      self.path.parent.mkdir(parents=True, exist_ok=True)
      try:
        self._lock = locks.Lock(
          f"{self.path}.lock", if_in_doubt=True, unnamed=True
        )
      except locks.Held as error:
        raise LogError(
          f"Another coordinator has the log {self}: {error.holder}."
        ) from None
      stack.callback(self._lock.release)
      flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
      self._file = os.open(self.path, flags, 0o600)
      stack.pop_all()

  def __str__(self) -> str:
    return str(self.path)

  @property
  def is_long(self) -> bool:
    return self._size > self._limit

  def read(self) -> Iterator[bytes]:
    """All records; a last one that was cut short is cut off."""
    with _as_log_error(self.path):
      data = self.path.read_bytes()
      # Perhaps zeros, if the host has lost its power before anything was synced.
      if _MAGIC.startswith(data.rstrip(b"\0")):
        os.ftruncate(self._file, 0)
        self._write(_MAGIC)
        files.sync(self.path.parent)
        return
    if not data.startswith(_MAGIC):
      raise LogError(
        f"{self} is no log of this version: it begins with {data[:24]!r}. Give the"
        " run a log of its own."
      )
    at = len(_MAGIC)
    while at < len(data):
      body = at + _HEAD.size + _SUM.size
      head = data[at : at + _HEAD.size]
      is_whole = data[at + _HEAD.size : body] == _SUM.pack(zlib.crc32(head))
      # A damaged length is not used: it could skip all following records.
      length, checksum = _HEAD.unpack(head) if is_whole else (0, 0)
      end = body + length
      record = data[body:end]
      if not is_whole or zlib.crc32(record) != checksum:
        if data[end:].strip(b"\0"):
          raise LogError(
            f"The log {self} is damaged at byte {at}: the checksum of a record is"
            " wrong. Resume from a checkpoint, with a log of its own."
          )
        os.ftruncate(self._file, at)
        break
      yield record
      at = end
    self._size = at

  def append(self, record: bytes, durable: bool) -> None:
    """Writes a record; raises `OSError` if it can't be written."""
    whole = os.fstat(self._file).st_size == self._size
    if not (whole and files.is_at(self.path, self._file)):
      # The next coordinator would not find a record in the old file. After this error
      # `replace` writes the whole log anew.
      what = "It was deleted, moved or changed"
      raise OSError(errno.ENOENT, what, str(self.path))
    self._write(_framed(record))
    if durable:
      os.fsync(self._file)

  def replace(self, record: bytes) -> None:
    """Writes a file of one record, which takes the place of this one."""
    new = self.path.with_name(f"{self.path.name}.new")
    data = _MAGIC + _framed(record)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    file = os.open(new, flags, 0o600)
    try:
      if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, "No space left on device")
      os.fsync(file)
      os.replace(new, self.path)
      files.sync(self.path.parent)
    except BaseException:
      os.close(file)
      new.unlink(missing_ok=True)
      raise
    os.close(self._file)
    self._file, self._size = file, len(data)
    self._limit = self._size + _LARGE

  def close(self) -> None:
    """Closes the file, for another process to continue it."""
    os.close(self._file)
    self._lock.release()

  def _write(self, data: bytes) -> None:
    written = os.write(self._file, data)
    if written < len(data):
      # The disk is full: no half of a record may precede another one.
      os.ftruncate(self._file, self._size)
      raise OSError(errno.ENOSPC, "No space left on device")
    self._size += written


def _framed(record: bytes) -> bytes:
  head = _HEAD.pack(len(record), zlib.crc32(record))
  return head + _SUM.pack(zlib.crc32(head)) + record


@contextlib.contextmanager
def _as_log_error(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise LogError(
      f"The log {path} can't be written: {_why(error, path)}."
    ) from None


def _why(error: OSError, log: object) -> str:
  """The text of an error; names the file if that is not the log itself."""
  why = error.strerror or str(error)
  is_other = error.filename is not None and str(error.filename) != str(log)
  return f"{why} ({error.filename})" if is_other else why


def check_own(path: pathlib.Path) -> None:
  """Makes the folder of a log among temporary files, where others may make it first.

  Raises:
    LogError: it belongs to another user, who could replace the logs in it.
  """
  folder = path.parent
  with _as_log_error(path):
    files.check_regular(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.lstat().st_uid
  if owner != os.getuid():
    raise LogError(
      f"The folder {folder}, for logs of jobs without one, belongs to another user"
      f" ({owner}). Set TMPDIR to a folder of your own."
    )


def forget_if_old(path: pathlib.Path, seconds: float) -> None:
  """Deletes a log that no coordinator has, and that was not written for so long.

  Otherwise the next job that uses the log's port would find it.
  """
  # There may be no log, or it may be in use.
  with contextlib.suppress(OSError, LogError):
    if time.time() - os.stat(path).st_mtime >= seconds:
      check_own(path)
      forget(path)


def forget(path: pathlib.Path) -> None:
  """Deletes a log that no coordinator has, and the logs of named runs beside it.

  Raises:
    LogError: a coordinator has it.
  """
  for file in (path, *path.parent.glob(f"{path.name}.????????????????")):
    if file.exists():
      FileRecords(file).close()
      file.unlink(missing_ok=True)


def goes_on(path: pathlib.Path, replicas: int) -> bool:
  """Whether a log has a run of so many replicas that has not ended.

  Raises:
    LogError: it can't be continued.
  """
  if not path.exists():
    return False
  with contextlib.closing(Log(FileRecords(path))) as log:
    history = log.read()
  return (
    history.job is not None
    and history.ended is None
    and history.job.rules.total_num_replicas == replicas
  )
