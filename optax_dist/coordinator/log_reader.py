"""The next entry of the log, by the shortest way.

The chief of this process delivers what it writes, one of this host leaves it as
a note, and everything is on the board. Whoever has fallen behind reads there
until it is up to date: what has been overwritten would be waited for in vain.

An entry may be foretold: it will most likely stand there very soon, and what it
will ask for can be prepared meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from optax_dist.coordinator import board_log, engine, local_line, messages

_log = logging.getLogger("optax_dist.coordinator")

# For what should be there, if it is at all.
_AT_ONCE = 0.001

Entry = local_line.Entry


class LogReader:
  """Reads one log, entry after entry."""

  def __init__(
    self,
    log: board_log.BoardLog,
    line: local_line.LocalLine,
    notes: engine.Notes | None,
    prepare: Callable[[Entry], None] = lambda entry: None,
  ):
    """A reader.

    Args:
      log: what is read.
      line: to a chief of this process.
      notes: of this host, where there are any.
      prepare: called with what is foretold.
    """
    self._log, self._line, self._notes = log, line, notes
    self._prepare = prepare
    self._by_notes = False
    # The position of the latest that was foretold, and how it was told.
    self._foretold: tuple[int, bytes] | None = None

  def read(
    self,
    position: int,
    chief: str | None,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> Entry:
    """Waits for an entry.

    Args:
      position: its place.
      chief: the address of who writes the log now, as far as is known.
      timeout: seconds to wait at most.
      cancelled: asked now and then; True ends the wait for a note.

    Raises:
      EngineTimeout, Trimmed, BadMessage: as `BoardLog.read`.
    """
    if self._line.is_open:
      found = self._line.read(position, timeout, self._prepare)
      # With a line to the chief there is seldom anything else to be read.
      return found or self._log.read(position, _AT_ONCE)
    if chief is None or self._notes is None or not self._notes.reaches(chief):
      return self._log.read(position, timeout)
    try:
      found = None
      if not self._by_notes:
        found = self._note(position, chief, 0.0)
        blob = None if found else self._log.peek(position)
        if blob is not None:
          return self._log.unpack(position, blob)
      if found is None:
        found = self._note(position, chief, timeout, cancelled)
    except engine.PeerLost:
      return self._log.read(position, timeout)
    self._by_notes = found is not None
    return found or self._log.read(position, _AT_ONCE)

  def _note(
    self,
    position: int,
    chief: str,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> Entry | None:
    assert self._notes is not None
    tickets = [self._log.ticket(position)]
    if self._foretold is None or self._foretold[0] != position:
      tickets.append(self._log.foretelling(position))
    found = self._notes.find(chief, tickets, timeout, cancelled)
    if found is not None and found[0] != tickets[0]:
      self._foretold = position, found[1]
      entry = self._unpacked(position, found[1])
      if entry is not None:
        self._prepare(entry)
      found = self._notes.find(chief, tickets[:1], timeout, cancelled)
    blob = found and found[1]
    if blob == board_log.AS_FORETOLD:
      blob = self._as_foretold(position, chief)
    # Without one it comes later, or is too large for a note.
    return self._unpacked(position, blob) if blob else None

  def _as_foretold(self, position: int, chief: str) -> bytes | None:
    if self._foretold is not None and self._foretold[0] == position:
      return self._foretold[1]
    assert self._notes is not None
    found = self._notes.find(chief, [self._log.foretelling(position)])
    return found and found[1]

  def _unpacked(self, position: int, blob: bytes) -> Entry | None:
    try:
      return self._log.unpack(position, blob)
    except messages.BadMessage as error:
      _log.warning("a note of entry %d is ignored: %s", position, error)
      return None
