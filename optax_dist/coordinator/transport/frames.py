"""Small frames of a connection: queued, signed if there are keys, and checked.

A frame is a header (length, kind, id), a tag if frames are signed, and a body. The
tag is HMAC-SHA256 over the frame's sequence number, its header and its body.
"""

from __future__ import annotations

import collections
import enum
import hmac
import struct

# Bytes of an array in one frame, for which messages wait.
PIECE = 2 << 20
HEADER = struct.Struct("<IBQ")
WORD = struct.Struct("<Q")
TAG = 16
_AT_ONCE = 64 << 10  # Bytes of frames that are joined into one write.


class Kind(enum.IntEnum):
  """The kind of a frame, with its content."""

  MESSAGE = 0
  PING = 1
  BYE = 2
  READY = 3  # An array is expected; its size.
  CHUNK = 4  # A piece of an array.
  CANCEL = 5  # Its reason.
  # An array is in a buffer; its file, size and inode, and where in it.
  OFFER = 6
  RELEASE = 7


class Faulty(Exception):
  """The peer violated the protocol."""


class Frames:
  """Frames that wait to be written, and the signatures in both directions.

  Attributes:
    backlog: bytes of frames that wait.
    keys: to sign outgoing frames and check incoming ones; None for neither.
  """

  def __init__(self) -> None:
    self.backlog = 0
    self.keys: tuple[bytes, bytes] | None = None
    self._signed = self._checked = 0
    self._queue: collections.deque[tuple[Kind, int, bytes]] = (
      collections.deque()
    )

  def put(self, kind: Kind, number: int, body: bytes = b"") -> None:
    """Queues a frame."""
    self.backlog += len(body) + HEADER.size
    self._queue.append((kind, number, body))

  def pop(self) -> bytes:
    """The waiting frames to write next."""
    texts: list[bytes] = []
    room = _AT_ONCE
    while self._queue and room > 0:
      kind, number, body = self._queue.popleft()
      self.backlog -= len(body) + HEADER.size
      head = HEADER.pack(len(body), kind, number)
      if self.keys is not None:
        head += self._tag(self.keys[0], self._signed, head + body)
        self._signed += 1
      texts += [head, body]
      room -= len(head) + len(body)
    return b"".join(texts)

  def clear(self) -> None:
    """Drops all that wait."""
    self._queue.clear()
    self.backlog = 0

  def check(self, head: bytes, tag: bytes, body: bytes) -> None:
    """Checks the signature of a frame that was received.

    Raises:
      Faulty: the signature is wrong.
    """
    assert self.keys is not None
    right = self._tag(self.keys[1], self._checked, head + body)
    self._checked += 1
    if not hmac.compare_digest(right, tag):
      raise Faulty("a frame with a wrong signature")

  def _tag(self, key: bytes, count: int, text: bytes) -> bytes:
    return hmac.digest(key, WORD.pack(count) + text, "sha256")[:TAG]
