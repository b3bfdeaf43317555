"""A folder that only one command at a time writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import IO

from optax_dist.cli import errors

NAME = ".lock"


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[None]:
  """Locks an output folder while the block runs.

  If this process is killed, the kernel releases the lock. Where the file system
  has no locks, as on some network file systems, nothing is locked.

  Args:
    folder: the folder; it exists.

  Raises:
    errors.CommandError: another process has locked it, or the lock can't be
      written.
  """
  path = folder / NAME
  file = _lock(path, folder)
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      path.unlink()
    with contextlib.suppress(OSError):  # The disk may be full.
      file.close()


def _lock(path: pathlib.Path, folder: pathlib.Path) -> IO[str]:
  while True:
    try:
      file = path.open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
      raise errors.CommandError(
        f"--output {folder}: can't be written: {error.strerror} ({path})"
      ) from error
    try:
      # On NFS, a lock needs a file that is open for writing.
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      with file:
        file.seek(0)
        holder = file.read(1000).strip() or "another process"
      raise errors.CommandError(
        f"--output {folder} is in use by {holder}; wait until it has ended, or"
        " give another folder"
      ) from None
    except OSError:
      return file  # There are no locks.
    if _is_at(path, file):
      break
    file.close()  # The last holder has just removed it.
  with contextlib.suppress(OSError):
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
  return file


def _is_at(path: pathlib.Path, file: IO[str]) -> bool:
  try:
    return os.path.samestat(path.stat(), os.fstat(file.fileno()))
  except FileNotFoundError:
    return False
