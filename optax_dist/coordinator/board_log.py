"""One log that everybody reads in the same order, and one chief appends to.

An entry is put only where none is, so of two who believe to be chief one
succeeds: the board, not an election, decides what is committed.
"""

from __future__ import annotations

from optax_dist.coordinator import engine, messages

BLOCK = 64
# Of all inboxes.
FOLDER = "in"
# The note of an entry that was foretold word by word.
AS_FORETOLD = b"="


class Trimmed(LookupError):
  """The entry was removed; whoever needs it has fallen too far behind."""


class BoardLog:
  """A log on a board.

  Attributes:
    secret: the job's.
  """

  def __init__(
    self,
    board: engine.Board,
    secret: bytes,
    name: str = "log",
    notes: engine.Notes | None = None,
  ):
    """A log.

    Args:
      board: where it is.
      secret: the job's.
      name: of the log.
      notes: where what is appended is left, too, for others of this host.
    """
    self._board, self._notes = board, notes
    self.secret = secret
    self._name = name

  def _key(self, position: int) -> str:
    return f"{self._name}/{position // BLOCK}/{position % BLOCK}"

  def append(
    self,
    position: int,
    header: messages.Header,
    payload: bytes = b"",
    foretell: bool = False,
  ) -> bool:
    """Puts an entry; False if there is one, of somebody else, already.

    Where an entry was removed, there is room again. So it counts only if the
    marker, written before anything is removed, is not beyond it afterwards.

    Args:
      position: its place.
      header: what it says.
      payload: bytes that belong to it.
      foretell: whether others of this host are to read it before it stands, and
        may not: so that they can prepare for it.

    Raises:
      Trimmed: another chief has gone on, and has removed the entry there.
    """
    key = self._key(position)
    blob = messages.pack(self.secret, key, header, payload)
    foretold = foretell and self._leave(self.foretelling(position), blob)
    if not self._board.put(key, blob):
      return False
    try:
      self._check(position)
    except Trimmed:
      self._board.delete(key)
      raise
    note = AS_FORETOLD if foretold else blob
    # An empty one says that it is to be read from the board.
    if not self._leave(self.ticket(position), note):
      self._leave(self.ticket(position), b"")
    return True

  def _leave(self, ticket: int, note: bytes) -> bool:
    if self._notes is None:
      return False
    try:
      return self._notes.leave(ticket, note)
    except engine.PeerLost:
      return False  # This process is ending.

  def ticket(self, position: int) -> int:
    """The ticket of the note that has the entry."""
    return messages.ticket(self.secret, "note", self._key(position))

  def foretelling(self, position: int) -> int:
    """The ticket of the note that has what may become the entry."""
    return messages.ticket(self.secret, "foretold", self._key(position))

  def unpack(self, position: int, blob: bytes) -> tuple[messages.Header, bytes]:
    """Reads what was found as this entry; raises `BadMessage`."""
    return messages.unpack(self.secret, self._key(position), blob)

  def peek(self, position: int) -> bytes | None:
    """The entry as it stands there now, if one does.

    Raises:
      Trimmed: what stands there was put after the entry was removed.
    """
    blob = self._board.try_get(self._key(position))
    if blob is not None:
      self._check(position)
    return blob

  def _check(self, position: int) -> None:
    """Raises `Trimmed` if the entry was removed; asked after it was found."""
    if position < self.trimmed():
      raise Trimmed(f"entry {position} was removed")

  def read(
    self, position: int, timeout: float
  ) -> tuple[messages.Header, bytes]:
    """Waits for an entry.

    Raises:
      EngineTimeout: there is none after `timeout` seconds.
      Trimmed: it was removed.
      BadMessage: it was not written by a member of the job.
    """
    key = self._key(position)
    try:
      blob = self._board.get(key, timeout)
    except engine.EngineTimeout:
      self._check(position)
      raise
    self._check(position)
    return self.unpack(position, blob)

  def has(self, position: int) -> bool:
    """Whether anything stands there now, though it may have been removed."""
    return self._board.try_get(self._key(position)) is not None

  def end(self) -> int:
    """The first position without an entry, found in few questions."""
    low = high = self.trimmed()
    if not self.has(low):
      return low
    while self.has(high):
      low, high = high, high + BLOCK
    while high - low > 1:
      middle = (low + high) // 2
      if self.has(middle):
        low = middle
      else:
        high = middle
    return high

  def trimmed(self) -> int:
    """The first position that was not removed."""
    found = 0
    for key, blob in self._board.items(f"{self._name}-trimmed").items():
      header, _ = messages.unpack(self.secret, key, blob)
      found = max(found, header["position"])
    return found

  def trim(self, position: int) -> None:
    """Removes whole blocks before `position`."""
    block = position // BLOCK
    start = self.trimmed() // BLOCK
    if block <= start:
      return
    # A key each: a chief that stalls right here can't set the marker back.
    key = f"{self._name}-trimmed/{block}"
    header = {"kind": "trimmed", "position": block * BLOCK}
    self._board.put(key, messages.pack(self.secret, key, header))
    for old in range(start, block):
      self._board.delete(f"{self._name}/{old}")
      self._board.delete(f"{self._name}-trimmed/{old}")


class Inbox:
  """Messages of one replica to the chief of one term, in order.

  A new term has new keys, so nothing of an old chief's is read twice.
  """

  def __init__(
    self, board: engine.Board, secret: bytes, term: int, incarnation: int
  ):
    self._board, self._secret = board, secret
    self._folder = f"{FOLDER}/{term}/{incarnation}"
    self._next = self._cleared = 0

  def _key(self) -> str:
    return f"{self._folder}/{self._next // BLOCK}/{self._next % BLOCK}"

  def send(self, header: messages.Header, payload: bytes = b"") -> None:
    """Puts the next message; a key that a stranger has taken is passed over."""
    sent = False
    while not sent:
      key = self._key()
      blob = messages.pack(self._secret, key, header, payload)
      sent = self._board.put(key, blob)
      self._next += 1

  def receive(self, timeout: float) -> tuple[messages.Header, bytes]:
    """Waits for the next message; a bad one is passed over, and told.

    Raises:
      EngineTimeout: there is none after `timeout` seconds.
      BadMessage: it is not one of this job's; the next call reads on.
    """
    key = self._key()
    blob = self._board.get(key, timeout)
    self._next += 1
    found = messages.unpack(self._secret, key, blob)
    # The sender has passed what is before its own message, and only then: it
    # might put the next one where a stranger's was removed.
    while self._cleared < (self._next - 1) // BLOCK:
      self._board.delete(f"{self._folder}/{self._cleared}")
      self._cleared += 1
    return found
