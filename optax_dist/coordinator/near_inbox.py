"""Messages to a chief of the same host, which do not go by the board."""

from __future__ import annotations

import collections
import time

from optax_dist.coordinator import engine, messages

# The reader says how far it is after so much; the sender keeps this much more
# before it asks.
_TELL_AFTER, _TELL_AFTER_BYTES = 32, 64 << 10
_KEPT, _KEPT_BYTES = 128, 512 << 10
_PAUSE = 0.01
# Of all these inboxes.
FOLDER = "near"


class NearInbox:
  """As `board_log.Inbox`, by notes, in the order in which they are sent.

  A note disappears when many have followed. What the reader has not had by then
  goes to the board: nothing is lost if the chief stands still for a while.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    secret: bytes,
    term: int,
    incarnation: int,
    other: str,
  ):
    """Opens one end.

    Args:
      engine_: one with notes.
      secret: the job's.
      term: the chief's.
      incarnation: the sender's.
      other: the address of who is at the other end.
    """
    assert engine_.notes is not None
    self._board, self._notes = engine_.board, engine_.notes
    self._secret, self._other = secret, other
    self._folder = f"{FOLDER}/{term}/{incarnation}"
    self._next = 0
    # The sender's: what the reader may not have had yet.
    self._unread: collections.deque[tuple[int, bytes]] = collections.deque()
    self._unread_bytes = 0
    # The reader's.
    self._untold = self._untold_bytes = 0
    self._by_board = False
    self._bad: bytes | None = None

  def _key(self, number: int) -> str:
    return f"{self._folder}/{number}"

  def _ticket(self, key: str) -> int:
    return messages.ticket(self._secret, "note", key)

  def coming(self, count: int) -> list[int]:
    """The tickets of the messages that follow."""
    numbers = range(self._next, self._next + count)
    return [self._ticket(self._key(number)) for number in numbers]

  def send(self, header: messages.Header, payload: bytes = b"") -> None:
    """Leaves the next message.

    Raises:
      BoardLost: it would have to go to the board, and can't.
    """
    number, self._next = self._next, self._next + 1
    key = self._key(number)
    blob = messages.pack(self._secret, key, header, payload)
    ticket = self._ticket(key)
    try:
      if not self._notes.leave(ticket, blob):
        # An empty note: it is on the board.
        self._board.put(key, blob, overwrite=True)
        self._notes.leave(ticket, b"")
        return
    except engine.PeerLost as error:
      raise engine.BoardLost(str(error)) from None
    self._unread.append((number, blob))
    self._unread_bytes += len(blob)
    if len(self._unread) > _KEPT or self._unread_bytes > _KEPT_BYTES:
      self._make_room()

  def _make_room(self) -> None:
    read = self._others_place()
    while self._unread:
      number, blob = self._unread[0]
      enough = (
        len(self._unread) <= _KEPT // 2
        and self._unread_bytes <= _KEPT_BYTES // 2
      )
      if number >= read:
        if enough:
          break
        self._board.put(self._key(number), blob, overwrite=True)
      self._unread.popleft()
      self._unread_bytes -= len(blob)

  def _others_place(self) -> int:
    """The number of the first message that the reader has not had."""
    key = f"{self._folder}/read"
    try:
      found = self._notes.find(self._other, [self._ticket(key)])
    except engine.PeerLost:
      return self._next  # Nobody reads any more.
    if found is None:
      return 0
    try:
      return messages.unpack(self._secret, key, found[1])[0]["number"]
    except messages.BadMessage:
      return 0

  def receive(self, timeout: float) -> tuple[messages.Header, bytes]:
    """Waits for the next message.

    Raises:
      EngineTimeout: there is none after `timeout` seconds.
      BadMessage: a note is not of this job; it is waited on for the right one.
      PeerLost: the sender has ended, and nothing more of it can be read.
    """
    key = self._key(self._next)
    blob = None
    try:
      if self._by_board:
        blob = self._find(key, 0.0)
        if blob is None:
          blob = self._board.try_get(key)
      if blob is None:
        self._by_board = False
        blob = self._find(key, timeout)
    except engine.PeerLost:
      blob = self._board.try_get(key)
      if blob is None:
        raise
      self._by_board = True
    if not blob:
      # Overwritten, too large, or not sent yet.
      told, blob = blob is not None, self._board.try_get(key)
      if blob is None:
        if told:
          time.sleep(_PAUSE)  # Somebody has removed it.
        raise engine.EngineTimeout(f"no {key!r} after {timeout:g} s")
      self._by_board = True
    try:
      found = messages.unpack(self._secret, key, blob)
    except messages.BadMessage:
      if blob != self._bad:
        self._bad = blob
        raise
      # It has been told of; the right one will take its place.
      time.sleep(_PAUSE)
      raise engine.EngineTimeout(f"no {key!r} yet") from None
    if self._by_board:
      self._board.delete(key)
    self._next += 1
    self._tell(len(blob))
    return found

  def _find(self, key: str, timeout: float) -> bytes | None:
    found = self._notes.find(self._other, [self._ticket(key)], timeout)
    return found and found[1]

  def _tell(self, nbytes: int) -> None:
    """Says now and then how far this end has read."""
    self._untold += 1
    self._untold_bytes += nbytes
    if self._untold < _TELL_AFTER and self._untold_bytes < _TELL_AFTER_BYTES:
      return
    self._untold = self._untold_bytes = 0
    key = f"{self._folder}/read"
    header = {"kind": "read", "number": self._next}
    self._notes.leave(
      self._ticket(key), messages.pack(self._secret, key, header)
    )
