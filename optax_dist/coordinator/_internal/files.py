"""Checks of files that a process opens, and writes that survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib


def check_regular(path: str | os.PathLike[str]) -> None:
  """Refuses a pipe or a device: opening one may wait for ever for its other end.

  A path that can't be sent to other processes in a message is refused, too.

  Raises:
    OSError: it is one of these.
  """
  path = pathlib.Path(path)
  try:
    str(path).encode()
  except UnicodeEncodeError:
    raise OSError(errno.EILSEQ, "Its name is not in UTF-8", str(path)) from None
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise OSError(
      errno.EINVAL, "It is no regular file (a pipe or a device)", str(path)
    )


def is_at(path: str | os.PathLike[str], file: int) -> bool:
  """Whether a path leads to an open file, which may have been moved or deleted."""
  with contextlib.suppress(FileNotFoundError):
    return os.path.samestat(os.stat(path), os.fstat(file))
  return False


def sync(path: str | os.PathLike[str]) -> None:
  """Waits until a file, or the names in a folder, are on the disk.

  Raises:
    OSError: they can't be written.
  """
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  except OSError as error:
    if error.errno != errno.EINVAL:  # Some file systems can't, for a folder.
      raise
  finally:
    os.close(number)
