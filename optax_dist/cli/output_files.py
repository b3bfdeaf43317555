"""Single files that a command writes where its arguments say."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from optax_dist.cli import errors

# What matplotlib writes, by the ending of the name; without one it is a PNG.
PICTURES = {
  "": "png",
  ".jpeg": "jpeg",
  ".jpg": "jpeg",
  ".pdf": "pdf",
  ".png": "png",
  ".svg": "svg",
}


def picture_format(path: pathlib.Path) -> str:
  """Returns the format that a picture's name asks for.

  Raises:
    errors.CommandError: it is none of those there are.
  """
  try:
    return PICTURES[path.suffix.lower()]
  except KeyError:
    known = ", ".join(suffix for suffix in PICTURES if suffix)
    raise errors.CommandError(
      f"can't write {path}: a picture's name ends in one of {known}"
    ) from None


def check_writable(
  *paths: pathlib.Path | None, picture: pathlib.Path | None = None
) -> None:
  """Raises an error now rather than after the work.

  Args:
    paths: where files are to be; None for one that was not asked for.
    picture: where a picture is to be.

  Raises:
    errors.CommandError: the directory of one of the files does not exist, or
      a picture's format is not known.
  """
  if picture is not None:
    picture_format(picture)
    paths = (*paths, picture)
  for path in paths:
    if path is not None and not path.absolute().parent.is_dir():
      raise errors.CommandError(
        f"can't write {path}: there is no directory {path.parent}"
      )


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
  """Reports in one line what goes wrong with a file.

  Raises:
    errors.CommandError: it can't be written.
  """
  try:
    yield
  except OSError as error:
    raise errors.CommandError(
      f"can't write {path}: {error.strerror}"
    ) from error


def write_json(path: pathlib.Path, report: Any) -> None:
  """Writes figures as JSON.

  Raises:
    errors.CommandError: it can't be written.
  """
  with writing(path):
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def tell(*paths: pathlib.Path | None) -> None:
  """Prints which files were written; None stands for one that was not asked for."""
  for path in filter(None, paths):
    print(f"written: {path}")
