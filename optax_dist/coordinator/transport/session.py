"""The frames of one connection, after the handshake.

Frames carry messages and pieces of arrays in turn; bytes in and bytes out, no
sockets. An array is sent once its receiver expects it:

    sender                               receiver
    send_array                           expect
        |  <----------- READY, its size -----|
        |  ------------ CHUNK, CHUNK ... --->|   into the memory passed to `expect`
    ArraySent                            ArrayReceived

    on one host, if it is in memory of `allocate`
        |  <----------- READY, its size -----|
        |  ------------ OFFER, its place --->|   copied, or read where it is
        |  <----------- RELEASE -------------|
    ArraySent                            ArrayReceived

An OFFER has the descriptor of its buffer, which the receiver opens in /proc; it keeps
the latest buffers mapped. A receiver that can't open it answers READY again, and gets
CHUNKs. CANCEL ends either transfer, in both directions. Arrays are sent one after the
other, so the first is complete while the next is being sent. Frames may be signed (see
`frames`), but not pieces of arrays: signing would take as long as moving them, and a
tag of their headers alone would not protect the array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optax_dist.coordinator.transport import (
  frames,
  interface,
  receiving,
  sending,
  shared_memory,
)
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.coordinator.transport.frames import HEADER, Faulty, Kind

STAGING = 64 << 10
_AHEAD = 128  # Bytes to read beyond a piece of an array: the next header.
_SMALL = 512  # Bytes of a frame that is no message.


class Session:
  """One side of a connection.

  Attributes:
    peer: the other side's name.
    frames: the frames that wait to be written.
    sending: the arrays that this side sends.
    receiving: the arrays that it receives.
    ended: reason of the peer's orderly close; None before it.
  """

  def __init__(
    self,
    peer: str,
    pool: shared_memory.Pool,
    emit: Callable[[interface.Event], None],
    clock: AwakeClock,
  ):
    """Creates a session that waits for its connection.

    Args:
      peer: the other side's name.
      pool: the buffers of this process.
      emit: called with each event.
      clock: the transport's.
    """
    self.peer = peer
    self.frames = frames.Frames()
    put = self.frames.put
    self.sending = sending.Sending(peer, pool, emit, put)
    self.receiving = receiving.Receiving(peer, emit, put, clock)
    self.ended: str | None = None
    self._emit = emit
    self._writing: list[memoryview | bytes] = []
    # Memory for bytes that belong to no array, and the part of it not yet processed.
    self._staging = memoryview(bytearray(STAGING))
    self._start = self._end = 0

  def start(
    self,
    keys: tuple[bytes, bytes] | None,
    process: int,
    unwritten: Sequence[memoryview | bytes] = (),
  ) -> None:
    """Starts the session: the connection is up.

    Args:
      keys: to sign outgoing frames and check incoming ones; None for neither.
      process: the peer's, if it is on this host; 0 otherwise.
      unwritten: the end of this side's handshake.
    """
    self.frames.keys = keys
    self.receiving.process, self.sending.shares = process, bool(process)
    self._writing += unwritten

  # Called by the transport.

  def send(self, payload: Sequence[interface.Buffer]) -> None:
    """Queues a message."""
    body = b"".join(payload)
    if len(body) > interface.MAX_MESSAGE:
      raise ValueError(
        f"A message has at most {interface.MAX_MESSAGE:,} bytes, got"
        f" {len(body):,}."
      )
    self.frames.put(Kind.MESSAGE, 0, body)

  def ping(self) -> None:
    """Queues a heartbeat, unless other output is queued."""
    if not (self.frames.backlog or self._writing):
      self.frames.put(Kind.PING, 0)

  def announce_close(self, reason: str) -> None:
    """Fails all transfers, and queues the last frame."""
    why = "this side has closed the connection"
    self.sending.cancel_all(why)
    self.receiving.cancel_all(why)
    self._own_output()
    self.frames.put(Kind.BYE, 0, reason.encode()[:_SMALL])

  def cancel(self, transfer: int) -> None:
    """See `Transport.cancel`."""
    self._cancel(transfer, None)
    self.frames.put(Kind.CANCEL, transfer, b"it was cancelled")

  def close(self, reason: str = "") -> None:
    """Fails all transfers, and ends the use of buffers that the peer may read."""
    self.sending.close(reason)
    self.receiving.close(reason)
    self.frames.clear()
    self._writing.clear()

  # Writing.

  def output(self) -> list[memoryview | bytes]:
    """The next bytes to write, once it has started; see `sent`."""
    if not self._writing:
      if self.frames.backlog:
        self._writing.append(self.frames.pop())
      if self.sending.queue:
        self._writing += self.sending.next_pieces()
    return self._writing

  def sent(self, nbytes: int) -> None:
    """Reports how many bytes of `output` were written."""
    writing = self._writing
    while nbytes:
      first = len(writing[0])
      if nbytes < first:
        writing[0] = memoryview(writing[0])[nbytes:]
        return
      nbytes -= first
      del writing[0]
    if not writing and self.sending.finishing:
      self.sending.written()

  def _own_output(self) -> None:
    """Copies half-written output, since the caller may reuse its memory from now on."""
    self._writing = [bytes(part) for part in self._writing]

  # Reading.

  def room(self) -> list[memoryview]:
    """The buffers for the next bytes; see `received`."""
    if self.receiving.left:
      return [self.receiving.room(), self._staging[:_AHEAD]]
    return [self._staging[self._end :]]

  def received(self, nbytes: int) -> None:
    """Processes bytes that were read.

    Raises:
      Faulty, struct.error: they violate the protocol.
    """
    if self.receiving.left:
      piece = min(nbytes, self.receiving.left)
      self.receiving.advance(piece)
      nbytes -= piece
    self._end += nbytes
    missing = 0
    while self._end - self._start >= HEADER.size and not missing:
      missing = self._parse()
    # A long message is gathered in a buffer of its size.
    size = max(STAGING, self._end - self._start + missing)
    if self._start or size != len(self._staging):
      rest = bytes(self._staging[self._start : self._end])
      if size != len(self._staging):
        self._staging = memoryview(bytearray(size))
      self._staging[: len(rest)] = rest
      self._start, self._end = 0, len(rest)

  def _parse(self) -> int:
    """Processes one frame, or the available bytes of a piece of an array.

    Returns:
      How many bytes the frame lacks; 0 if it was processed.
    """
    start = self._start
    length, kind, number = HEADER.unpack_from(self._staging, start)
    body = start + HEADER.size
    if kind == Kind.CHUNK:
      self.receiving.begin_piece(number, length)
      # The rest is read directly into its destination.
      here = min(self._end - body, length)
      self.receiving.room()[:here] = self._staging[body : body + here]
      self._start = body + here
      self.receiving.advance(here)
      return 0
    if length > (interface.MAX_MESSAGE if kind == Kind.MESSAGE else _SMALL):
      raise Faulty(f"a frame of kind {kind} with {length:,} bytes")
    if self.frames.keys is not None:
      body += frames.TAG
    end = body + length
    if end > self._end:
      return end - self._end
    head = bytes(self._staging[start : start + HEADER.size])
    tag = bytes(self._staging[start + HEADER.size : body])
    text = bytes(self._staging[body:end])
    if tag:
      self.frames.check(head, tag, text)
    self._start = end
    self._handle(kind, number, text)
    return 0

  def _handle(self, kind: int, number: int, body: bytes) -> None:
    match kind:
      case Kind.MESSAGE:
        self._emit(interface.Message(self.peer, body))
      case Kind.PING:
        pass
      case Kind.BYE:
        self.ended = body.decode(errors="replace")
      case Kind.READY:
        self.sending.expected(number, *frames.WORD.unpack(body))
      case Kind.CANCEL:
        self._cancel(number, body.decode(errors="replace"))
      case Kind.OFFER:
        self.receiving.offered(number, *sending.PLACE.unpack(body))
      case Kind.RELEASE:
        self.sending.released(number)
      case _:
        raise Faulty(f"a frame of unknown kind {kind}")

  def _cancel(self, transfer: int, reason: str | None) -> None:
    self.sending.cancel(transfer, reason)
    self.receiving.cancel(transfer, reason)
    self._own_output()
