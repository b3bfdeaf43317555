"""What a coordinator and its clients do, as transcripts that a person reads.

A transcript is commands (`room`) with what followed from each, and says in a comment
what matters in it. `TRANSCRIPTS=write pytest ...` writes what follows now: read the
difference.
"""

import os
import pathlib

import pytest

from optax_dist.coordinator.protocol.entries import RECORDS
from optax_dist.coordinator.protocol.history import History
from tests.coordinator.protocol.room import Room

_FILES = sorted((pathlib.Path(__file__).parent / "transcripts").glob("*.txt"))


def played(text: str, room: Room) -> str:
  """The transcript of the same commands and comments, as it is now."""
  lines: list[str] = []
  for line in text.splitlines():
    if line.startswith("> "):
      lines += ["", line]
      lines += [f"  {shown}".rstrip() for shown in room.execute(line[2:])]
    elif line.startswith("#"):
      lines += ["", line] if lines and not lines[-1].startswith("#") else [line]
  return "\n".join(lines) + "\n"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_transcript_is_reproduced(file):
  result = played(file.read_text(), Room())
  if os.environ.get("TRANSCRIPTS") == "write":
    file.write_text(result)
  assert result == file.read_text()


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_log_reproduces_the_state_of_the_coordinator(file):
  """Read again, as bytes, or as one entry in place of all."""
  room = Room()
  played(file.read_text(), room)
  assert room.chief is not None
  read, compacted = History(), History()
  for record in room.log:
    read.apply(RECORDS.decode(RECORDS.encode(record)))
  compacted.add(read.compacted())
  assert read == compacted == room.chief.history
