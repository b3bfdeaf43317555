"""The output file of a command."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from optax_dist.cli import errors


def check(path: pathlib.Path | None, read: pathlib.Path | None = None) -> None:
  """Raises an error before the work rather than after it.

  Args:
    path: the output file; None if none was requested.
    read: the command's input file, which the output must not overwrite.

  Raises:
    errors.CommandError: its directory does not exist, or it is the input.
  """
  if path is None:
    return
  if not path.absolute().parent.is_dir():
    raise errors.CommandError(
      f"can't write {path}: there is no directory {path.parent}"
    )
  if read and read.is_file() and path.exists() and path.samefile(read):
    raise errors.CommandError(f"can't write {path}: it is also an input")


def write_json(path: pathlib.Path | None, report: Any) -> None:
  """Writes a report as JSON, if it was requested.

  Raises:
    errors.CommandError: the file can't be written.
  """
  if path is None:
    return
  try:
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
  except OSError as error:
    raise errors.CommandError(
      f"can't write {path}: {error.strerror}"
    ) from error
  print(f"written: {path}")
