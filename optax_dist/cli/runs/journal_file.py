"""The journal argument of a command."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from optax_dist.cli import errors, parser

_SHOWN = 10


def add_argument(to: argparse.ArgumentParser) -> None:
  """Adds the journal argument to a command."""
  to.add_argument(
    "journal", metavar="FILE", type=pathlib.Path, help="the run's journal"
  )


@contextlib.contextmanager
def reading(path: pathlib.Path, flag: str = "") -> Iterator[None]:
  """Reports an error with the file in one line.

  Raises:
    errors.CommandError: it can't be read.
  """
  try:
    yield
  except OSError as error:
    raise errors.CommandError(
      f"{flag}{path}: can't be read: {error.strerror}"
    ) from error


def unwritten(path: pathlib.Path) -> str:
  """Why a journal has no record, and where the run's is, in words."""
  from optax_dist.coordinator import journal

  text = "nothing has been written to this journal yet"
  try:
    address = path.with_name(journal.WRITER).read_text("utf-8").strip()
  except (OSError, ValueError):
    return text
  return (
    f"{text}: the run's is on the host of its coordinator,"
    f" {parser.plain(address)}"
  )


def read(path: pathlib.Path, flag: str = "") -> list[dict[str, Any]]:
  """Reads a journal, and reports its invalid lines.

  Args:
    path: the file.
    flag: prefix of error messages.

  Returns:
    The valid records, at least one.

  Raises:
    errors.CommandError: it can't be read, or has no valid line.
  """
  from optax_dist.coordinator import journal

  with reading(path, flag):
    records, problems = journal.read(path)
    if not path.stat().st_size:
      raise errors.CommandError(f"{flag}{path}: {unwritten(path)}")
  for problem in problems[:_SHOWN]:
    parser.say(f"{path}: {problem}")
  if len(problems) > _SHOWN:
    parser.say(f"{path}: {len(problems) - _SHOWN} more lines are bad")
  if not records:
    raise errors.CommandError(f"{flag}{path}: no line of it can be used")
  if problems:
    parser.say(f"{path}: going on with the other {len(records)} lines")
  return records
