"""One log that everybody reads in the same order, and one chief appends to.

An entry is put only where none is, so of two who believe to be chief one
succeeds: the board, not an election, decides what is committed.
"""

from __future__ import annotations

from optax_dist.coordinator import engine, messages

BLOCK = 64


class Trimmed(LookupError):
  """The entry was removed; whoever needs it has fallen too far behind."""


class BoardLog:
  """A log on a board.

  Attributes:
    secret: the job's.
  """

  def __init__(self, board: engine.Board, secret: bytes, name: str = "log"):
    self._board = board
    self.secret = secret
    self._name = name

  def _key(self, position: int) -> str:
    return f"{self._name}/{position // BLOCK}/{position % BLOCK}"

  def append(
    self, position: int, header: messages.Header, payload: bytes = b""
  ) -> bool:
    """Puts an entry; False if there is one, of somebody else, already."""
    key = self._key(position)
    blob = messages.pack(self.secret, key, header, payload)
    return self._board.put(key, blob)

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
      if position < self.trimmed():
        raise Trimmed(f"entry {position} was removed") from None
      raise
    return messages.unpack(self.secret, key, blob)

  def has(self, position: int) -> bool:
    """Whether there is such an entry now."""
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
    key = f"{self._name}-trimmed"
    blob = self._board.try_get(key)
    if blob is None:
      return 0
    header, _ = messages.unpack(self.secret, key, blob)
    return header["position"]

  def trim(self, position: int) -> None:
    """Removes whole blocks before `position`."""
    key = f"{self._name}-trimmed"
    block = position // BLOCK
    start = self.trimmed() // BLOCK
    if block <= start:
      return
    header = {"kind": "trimmed", "position": block * BLOCK}
    self._board.put(
      key, messages.pack(self.secret, key, header), overwrite=True
    )
    for old in range(start, block):
      self._board.delete(f"{self._name}/{old}")


class Inbox:
  """Messages of one replica to the chief of one term, in order.

  A new term has new keys, so nothing of an old chief's is read twice.
  """

  def __init__(
    self, board: engine.Board, secret: bytes, term: int, incarnation: int
  ):
    self._board, self._secret = board, secret
    self._folder = f"in/{term}/{incarnation}"
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
