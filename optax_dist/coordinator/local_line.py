"""A short way between a chief and the replica of its own process.

What the chief has put into the log need not be read from there again, nor need
the replica's messages go by the board: two of three processes of a small step
would be messages to oneself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

_KEPT = 64

Mail = tuple[int, dict[str, Any], bytes]
Entry = tuple[dict[str, Any], bytes]


class LocalLine:
  """One replica's line to the chief of its own process, if there is one.

  Example:
    >>> line = LocalLine()
    >>> line.read(7, 0.0) is None, line.send(3, 0, {"kind": "ack"}, b"")
    (True, False)
    >>> mail = queue.SimpleQueue()
    >>> line.open(3, mail)
    >>> line.deliver(7, {"kind": "tick", "ack": False}, b"")
    >>> line.read(7, 1.0)
    ({'kind': 'tick', 'ack': False}, b'')
    >>> line.send(3, 0, {"kind": "ack"}, b""), mail.get()
    (True, (0, {'kind': 'ack'}, b''))
  """

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._entries: dict[int, Entry] = {}
    self._latest = -1
    self._foretold: tuple[int, Entry] | None = None
    self._term: int | None = None
    self._mail: queue.SimpleQueue[Mail] | None = None

  # The chief's end.

  def open(self, term: int, mail: queue.SimpleQueue[Mail]) -> None:
    """From now on the chief of this term takes mail and delivers entries."""
    with self._changed:
      self._term, self._mail, self._latest = term, mail, -1
      self._foretold = None
      self._entries.clear()

  def shut(self, term: int) -> None:
    """The chief of this term, or of an earlier one, is one no more."""
    with self._changed:
      if self._term is not None and self._term <= term:
        self._term = self._mail = None
      self._changed.notify_all()

  def foretell(
    self, position: int, entry: dict[str, Any], payload: bytes
  ) -> None:
    """Tells of an entry that may not come to stand in the log."""
    with self._changed:
      self._foretold = position, (dict(entry), payload)
      self._changed.notify_all()

  def deliver(
    self, position: int, entry: dict[str, Any], payload: bytes
  ) -> None:
    """Hands on an entry that is in the log, and will stay there."""
    with self._changed:
      # The chief goes on to change its own.
      self._entries[position] = dict(entry), payload
      self._latest = position
      self._entries.pop(position - _KEPT, None)
      self._changed.notify_all()

  # The replica's end.

  @property
  def is_open(self) -> bool:
    """Whether there is a chief at the other end."""
    return self._term is not None

  def send(
    self, term: int, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> bool:
    """Sends a message; False if the chief of this term is not here."""
    with self._changed:
      if self._mail is None or self._term != term:
        return False
      self._mail.put((incarnation, header, payload))
      return True

  def read(
    self,
    position: int,
    timeout: float,
    prepare: Callable[[Entry], None] = lambda entry: None,
  ) -> Entry | None:
    """An entry, if the chief of this process delivers it in time.

    One that is not there though a later one is, comes no more.

    Args:
      position: its place in the log.
      timeout: seconds to wait at most.
      prepare: called with what is foretold.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_there(position) or self._foretold is not None, timeout
      )
      foretold, self._foretold = self._foretold, None
    if foretold is not None and foretold[0] == position:
      prepare(foretold[1])
    with self._changed:
      self._changed.wait_for(lambda: self._is_there(position), timeout)
      return self._entries.pop(position, None)

  def _is_there(self, position: int) -> bool:
    return position <= self._latest or self._term is None
