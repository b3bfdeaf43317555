"""Output files named by arguments."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from optax_dist.cli import errors

# Formats by file extension; the default is PNG.
PICTURES = {
  "": "png",
  ".jpeg": "jpeg",
  ".jpg": "jpeg",
  ".pdf": "pdf",
  ".png": "png",
  ".svg": "svg",
}


def picture_format(path: pathlib.Path) -> str:
  """Returns the format for a picture's name.

  Raises:
    errors.CommandError: the format is unknown.
  """
  try:
    return PICTURES[path.suffix.lower()]
  except KeyError:
    known = ", ".join(suffix for suffix in PICTURES if suffix)
    raise errors.CommandError(
      f"can't write {path}: a picture's name ends in one of {known}"
    ) from None


def check_writable(
  *paths: pathlib.Path | None,
  picture: pathlib.Path | None = None,
  read: Iterable[pathlib.Path | None] = (),
) -> None:
  """Raises an error before the work rather than after it.

  Args:
    paths: paths of the output files; None for one that was not requested.
    picture: path of a picture.
    read: the command's input files, which no output may overwrite.

  Raises:
    errors.CommandError: the directory of a file does not exist, two of the
      files are the same, or the format of a picture is unknown.
  """
  if picture is not None:
    picture_format(picture)
    paths = (*paths, picture)
  taken = {path: "an input" for path in read if path is not None}
  for path in filter(None, paths):
    if not path.absolute().parent.is_dir():
      raise errors.CommandError(
        f"can't write {path}: there is no directory {path.parent}"
      )
    for other, what in taken.items():
      if _is_same(path, other):
        raise errors.CommandError(f"can't write {path}: it is also {what}")
    taken[path] = "another output"


def _is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
  """Whether both paths name one file; `/dev/null` may be given twice."""
  if one.exists() and other.exists():
    return one.is_file() and one.samefile(other)
  return one.absolute() == other.absolute()


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
  """Reports errors with a file in one line.

  Raises:
    errors.CommandError: the file can't be written.
  """
  try:
    yield
  except OSError as error:
    raise errors.CommandError(
      f"can't write {path}: {error.strerror}"
    ) from error


def write_json(path: pathlib.Path, report: Any) -> None:
  """Writes a report as JSON.

  Raises:
    errors.CommandError: the file can't be written.
  """
  with writing(path):
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def tell(*paths: pathlib.Path | None) -> None:
  """Prints which files were written; None means that one was not requested."""
  for path in filter(None, paths):
    print(f"written: {path}")
