"""Which way a replica's messages to the chief take: sender and chief agree."""

from __future__ import annotations

from optax_dist.coordinator import board_log, engine, near_inbox

AnyInbox = board_log.Inbox | near_inbox.NearInbox


def inbox(
  engine_: engine.Engine,
  secret: bytes,
  term: int,
  incarnation: int,
  other: str | None,
) -> AnyInbox:
  """One end of the messages of a replica to the chief of a term.

  Args:
    engine_: this process's.
    secret: the job's.
    term: the chief's.
    incarnation: the replica's.
    other: the address of who is at the other end; None if it has none.
  """
  notes = engine_.notes
  if notes is not None and other is not None and notes.reaches(other):
    return near_inbox.NearInbox(engine_, secret, term, incarnation, other)
  return board_log.Inbox(engine_.board, secret, term, incarnation)


def clear(
  board: engine.Board, term: int, incarnation: int | None = None
) -> None:
  """Removes what was sent in a term, by a replica or by all."""
  rest = "" if incarnation is None else f"/{incarnation}"
  for way in (board_log.FOLDER, near_inbox.FOLDER):
    board.delete(f"{way}/{term}{rest}")
