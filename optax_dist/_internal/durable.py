"""Private files that appear complete or not at all.

A file with parameters is readable by its owner only, appears under its name
complete or not at all, and survives a power failure.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


def write(path: pathlib.Path, data: bytes) -> None:
  """Writes a file, replacing an existing one; its mode is 0600."""
  number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
  try:
    with open(number, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(name, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(name)
    raise
  _sync(path.parent)


@contextlib.contextmanager
def folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Creates a folder with everything that the block writes, at the block's end.

  Args:
    path: the folder.

  Yields:
    A temporary path to write it to, which does not exist yet.

  Raises:
    FileExistsError: the folder exists at the end.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...   with folder(pathlib.Path(there, "new")) as new:
    ...     new.mkdir()
    ...     _ = (new / "file").write_text("text")
    ...   oct(pathlib.Path(there, "new", "file").stat().st_mode)[-3:]
    '600'
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  outer = pathlib.Path(
    tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
  )
  try:
    inner = outer / path.name
    yield inner
    for at, _, files in os.walk(inner, topdown=False):
      for name in files:
        os.chmod(os.path.join(at, name), 0o600)
        _sync(os.path.join(at, name))
      os.chmod(at, 0o700)
      _sync(at)
    if path.exists():
      raise FileExistsError(f"{path} exists.")
    os.rename(inner, path)
    _sync(path.parent)
  finally:
    shutil.rmtree(outer, ignore_errors=True)


def _sync(path: str | os.PathLike[str]) -> None:
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)
