"""What a coordinator and its clients do, as transcripts that a person reads.

A transcript is commands (`room`) with what followed from each, and says in a comment
what matters in it. `TRANSCRIPTS=write pytest ...` writes what follows now: read the
difference.
"""

import os
import pathlib

import pytest

from tests.coordinator.protocol.room import Room

_FILES = sorted((pathlib.Path(__file__).parent / "transcripts").glob("*.txt"))


def played(text: str) -> str:
  """The transcript of the same commands and comments, as it is now."""
  room, lines = Room(), []
  for line in text.splitlines():
    if line.startswith("> "):
      lines += ["", line]
      lines += [f"  {told}".rstrip() for told in room.execute(line[2:])]
    elif line.startswith("#"):
      lines += ["", line] if lines and not lines[-1].startswith("#") else [line]
  return "\n".join(lines) + "\n"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_a_transcript_is_what_happens(file):
  found = played(file.read_text())
  if os.environ.get("TRANSCRIPTS") == "write":
    file.write_text(found)
  assert found == file.read_text()
