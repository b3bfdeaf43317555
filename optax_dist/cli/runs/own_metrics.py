"""What a run's own script reports: a line of JSON for a step, in a file."""

from __future__ import annotations

import json
import os
import pathlib

# Beside the journal, in the folder that the script has as OPTAX_DIST_OUTPUT.
NAME = "metrics.jsonl"
_END = 4096  # Bytes at the end of the file, in which its last lines are.


def latest(journal: pathlib.Path) -> str:
  """The loss in the last line that has one; "" if none is reported.

  Args:
    journal: the run's journal.

  Example:
    >>> import tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / NAME).write_text('{"step": 3, "loss": 0.25}')
    >>> latest(folder / "journal.jsonl")
    'loss 0.25'
  """
  try:
    with journal.with_name(NAME).open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
      lines = file.read().splitlines()
  except OSError:
    return ""
  for line in reversed(lines):
    try:
      return f"loss {json.loads(line)['loss']:.4g}"
    except (ValueError, LookupError, TypeError):
      continue  # Another script's file, or a line that is not complete.
  return ""
