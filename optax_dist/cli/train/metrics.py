"""Metrics as JSON lines."""

import contextlib
import json
import pathlib
from typing import Any

from optax_dist.cli import output_files


class JsonLines:
  r"""Writes one JSON object per line, each immediately, so that none is ever
  lost.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with JsonLines(path) as lines:
    ...   lines.write({"step": 1, "loss": 0.5})
    >>> path.read_text()
    '{"step": 1, "loss": 0.5}\n'
  """

  def __init__(self, path: pathlib.Path):
    """Opens the file, and truncates it.

    Args:
      path: the file.

    Raises:
      errors.CommandError: if it can't be written, as from :meth:`write`.
    """
    self.path = path
    with output_files.writing(path):
      self._file = path.open("w", encoding="utf-8", buffering=1)

  def write(self, record: dict[str, Any]) -> None:
    """Writes a line. Numbers must be finite: JSON has no others."""
    line = json.dumps(record, allow_nan=False)
    with output_files.writing(self.path):
      self._file.write(line + "\n")

  def close(self) -> None:
    """Closes the file, without retrying failed writes."""
    with contextlib.suppress(OSError):
      self._file.close()

  def __enter__(self) -> "JsonLines":
    return self

  def __exit__(self, *exception) -> None:
    self.close()
