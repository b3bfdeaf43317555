"""Metrics as JSON lines."""

import contextlib
import json
import pathlib
from typing import Any

from optax_dist.cli import errors


class JsonLines:
  r"""Writes one JSON object per line, each at once, so that none is ever lost.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with JsonLines(path) as lines:
    ...   lines.write({"step": 1, "loss": 0.5})
    >>> path.read_text()
    '{"step": 1, "loss": 0.5}\n'
  """

  def __init__(self, path: pathlib.Path):
    """Opens the file; what it held is lost.

    Args:
      path: where to write.

    Raises:
      errors.CommandError: if it can't be written, as from :meth:`write`.
    """
    self.path = path
    try:
      self._file = path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
      raise self._error(error) from error

  def write(self, record: dict[str, Any]) -> None:
    """Writes a line. Numbers must be finite: JSON has no others."""
    line = json.dumps(record, allow_nan=False)
    try:
      self._file.write(line + "\n")
    except OSError as error:
      raise self._error(error) from error

  def close(self) -> None:
    """Closes the file. What could not be written before is given up."""
    with contextlib.suppress(OSError):
      self._file.close()

  def __enter__(self) -> "JsonLines":
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def _error(self, error: OSError) -> errors.CommandError:
    return errors.CommandError(f"can't write {self.path}: {error.strerror}")
