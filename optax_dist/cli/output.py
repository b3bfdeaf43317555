"""The output directory of a run."""

import pathlib
import tempfile

from optax_dist.cli import errors


def prepare(directory: pathlib.Path, files: list[str]) -> list[pathlib.Path]:
  """Creates a directory and checks that files can be written in it.

  Existing files are not changed.

  Args:
    directory: created with its parents if missing.
    files: names of the files to be written.

  Returns:
    The files' paths.

  Raises:
    errors.CommandError: if a file could not be written.
  """
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
    paths = [directory / name for name in files]
    for path in paths:
      if path.exists():
        with path.open("a"):
          pass
  except FileExistsError as error:
    raise errors.CommandError(
      f"--output {directory}: it is a file, not a directory"
    ) from error
  except OSError as error:
    at = f" ({error.filename})" if error.filename else ""
    raise errors.CommandError(
      f"--output {directory}: can't be written: {error.strerror}{at}"
    ) from error
  return paths
