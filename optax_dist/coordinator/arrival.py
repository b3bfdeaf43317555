"""A gradient on its way, and what became of it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Arrival(NamedTuple):
  """A gradient that was sent and whose fate is not known yet.

  Attributes:
    header: what the chief was told.
    payload: the gradient, where it rides in the message.
    buffer: the gradient, where it does not.
  """

  header: dict[str, Any]
  payload: bytes
  buffer: Any


class Fate(NamedTuple):
  """What became of an arrival.

  Attributes:
    reason: why it was dropped; None where it was not.
    step: the global step then.
    members: the replicas that took part in the commit.
    staleness: how many steps late it was.
    before: the shared state before the commit.
  """

  reason: str | None
  step: int
  members: tuple[Any, ...] = ()
  staleness: int = 0
  before: Any = None
