"""Locks that processes of all hosts respect, and that end with their process.

A lock is a file, locked by `flock`, with the host and process of its holder.
The system frees it when the holder ends, however it ends; on NFS its server does.
Where a file system has no locks, the content of the file counts: the lock is free if
its process has ended on this host. Whether a process of another host has ended can't
be known then; the caller that takes the lock decides what to do.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pathlib
import socket
import time

from optax_dist.coordinator._internal import files

_log = logging.getLogger("optax_dist.coordinator")

_RETRY_SECONDS = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Held(Exception):
  """Another process, or another user of this one, holds the lock.

  Attributes:
    holder: the process that holds the lock, human-readable.
    lives: whether that is a process of this host that runs.
  """

  def __init__(self, holder: str, lives: bool):
    super().__init__(f"It is held by {holder}.")
    self.holder, self.lives = holder, lives


class Lock:
  """A lock that this process holds until `release`, or until it ends.

  Attributes:
    file: its descriptor; a child process that inherits it holds the lock, too.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "lock")
    >>> with Lock(path):
    ...   try:
    ...     Lock(path)
    ...   except Held as error:
    ...     print(error.holder == f"process {os.getpid()} on {socket.gethostname()}")
    True
    >>> path.exists()
    False
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    timeout: float = 0.0,
    *,
    if_in_doubt: bool = False,
    unnamed: bool = False,
  ):
    """Takes the lock.

    Args:
      path: the file, which is created, and deleted in the end.
      timeout: seconds to wait for it.
      if_in_doubt: whether to take it then from a process of another host, if the
        file system has no locks.
      unnamed: whether to take it though the disk is full, so that the file does not
        name its holder.

    Raises:
      Held: it is not free in time.
      OSError: the file can't be written.
    """
    self._path, self.file = pathlib.Path(path), -1
    end = time.monotonic() + timeout
    self._in_doubt, self._unnamed = False, unnamed
    while not self._try_to_lock():
      host, pid = self._read()
      holder = f"process {pid} on {host}" if pid else "another process"
      if time.monotonic() < end:
        time.sleep(_RETRY_SECONDS)
      elif self._in_doubt and if_in_doubt:
        _log.warning(
          "%s has %s, and may have ended or not: this file system has no locks.",
          *(holder, self._path),
        )
        self._path.unlink(missing_ok=True)
      else:
        raise Held(holder, host == socket.gethostname() and _lives(pid))

  def release(self) -> None:
    """Frees the lock, unless a child that has inherited it lives on."""
    if self.file >= 0:
      if files.is_at(self._path, self.file):  # Not another process's new file.
        self._path.unlink(missing_ok=True)
      os.close(self.file)
      self.file = -1

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, *exception: object) -> None:
    self.release()

  def _try_to_lock(self) -> bool:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    self.file = os.open(self._path, flags, 0o666)
    try:
      # The last holder may have deleted the file since it was opened.
      if self._is_free() and files.is_at(self._path, self.file):
        holder = f"{socket.gethostname()} {os.getpid()}"
        try:
          os.ftruncate(self.file, 0)
          os.pwrite(self.file, holder.encode(), 0)
        except OSError:
          if not self._unnamed:
            raise
        return True
    except BaseException:
      os.close(self.file)
      raise
    os.close(self.file)
    self.file = -1
    return False

  def _is_free(self) -> bool:
    try:
      fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return False
    except OSError as error:
      if error.errno not in _NO_LOCKS:
        raise
      host, pid = self._read()
      self._in_doubt = bool(pid) and host != socket.gethostname()
      return not pid or not (self._in_doubt or _lives(pid))
    return True

  def _read(self) -> tuple[str, int]:
    try:
      host, _, pid = self._path.read_text("utf-8").rpartition(" ")
      return host, int(pid)
    except (OSError, ValueError):
      return "", 0


def _lives(pid: int) -> bool:
  """Whether a process of this host runs; one that waits for its parent does not."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except OSError:
    return True  # The process exists, and belongs to another user.
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
  except OSError:
    return True  # This system has no such file.
  return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
