"""Locks that processes of all hosts respect, and that end with their process.

A lock is a file, locked by `flock`, with the host and process of its holder.
The system frees it when the holder ends, however it ends; on NFS its server does.
Where a file system has no locks, the content of the file counts: it is
free if its process has ended on this host. Nobody can tell of another host's
process, whose file then has to be deleted by hand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import socket
import time

_PAUSE = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Held(Exception):
  """Another process, or another user of this one, holds the lock.

  Attributes:
    holder: who, for people.
  """

  def __init__(self, holder: str):
    super().__init__(f"It is held by {holder}.")
    self.holder = holder


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

  def __init__(self, path: str | os.PathLike[str], patience: float = 0.0):
    """Takes the lock.

    Args:
      path: the file, which is created, and deleted in the end.
      patience: seconds to wait for it.

    Raises:
      Held: it is not free in time.
      OSError: the file can't be written.
    """
    self._path, self.file = pathlib.Path(path), -1
    end = time.monotonic() + patience
    while not self._take():
      if time.monotonic() >= end:
        raise Held(self._holder())
      time.sleep(_PAUSE)

  def release(self) -> None:
    """Frees the lock, unless a child that has inherited it lives on."""
    if self.file >= 0:
      self._path.unlink(missing_ok=True)
      os.close(self.file)
      self.file = -1

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, *exception: object) -> None:
    self.release()

  def _take(self) -> bool:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    self.file = os.open(self._path, flags, 0o666)
    try:
      if self._is_free() and self._is_current():
        os.ftruncate(self.file, 0)
        os.pwrite(
          self.file, f"{socket.gethostname()} {os.getpid()}".encode(), 0
        )
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
      return not pid or (host == socket.gethostname() and not _lives(pid))
    return True

  def _is_current(self) -> bool:
    """Whether the last holder has not deleted the file meanwhile."""
    try:
      return os.path.samestat(os.stat(self._path), os.fstat(self.file))
    except FileNotFoundError:
      return False

  def _read(self) -> tuple[str, int]:
    try:
      host, _, pid = self._path.read_text("utf-8").rpartition(" ")
      return host, int(pid)
    except (OSError, ValueError):
      return "", 0

  def _holder(self) -> str:
    host, pid = self._read()
    return f"process {pid} on {host}" if pid else "another process"


def _lives(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except OSError:
    return True  # It is another user's.
  return True
