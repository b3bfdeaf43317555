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

An OFFER has the descriptor of its buffer, which the receiver opens in /proc; it
keeps the latest ones mapped. One that can't answers READY again, and is sent CHUNKs.
CANCEL ends either, in both directions.
Each frame is a header (length, kind, id), a tag if frames are signed,
and a body. The tag is HMAC-SHA256 over the frame's sequence number, its header
and its body. Pieces of arrays have none: it would take as long as moving them, and
a tag of their headers alone would hinder nobody from changing the array.
"""

from __future__ import annotations

import collections
import dataclasses
import hmac
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from optax_dist.coordinator.transport import interface, shared_memory

if TYPE_CHECKING:
  import numpy as np

# Bytes of an array in one frame, for which messages wait.
PIECE = 512 << 10
_REMEMBERED = 16384  # Transfers that only one side has begun, or has given up.
_MAPPED = 32  # Buffers of the peer.
STAGING = 64 << 10
_AHEAD = 128  # Bytes to read beyond a piece of an array: the next header.

_HEADER = struct.Struct("<IBQ")
_WORD = struct.Struct("<Q")
_PLACE = struct.Struct("<QQQQ")
_TAG = 16
_T = TypeVar("_T")
(
  _MESSAGE,
  _PING,
  _BYE,
  _READY,  # An array is expected; its size.
  _CHUNK,
  _CANCEL,  # Its reason.
  _OFFER,  # An array is in a buffer; its file, size and inode, and where in it.
  _RELEASE,
) = range(8)


class Faulty(Exception):
  """The peer violated the protocol."""


@dataclasses.dataclass(slots=True)
class _Incoming:
  """An array that is expected."""

  nbytes: int
  memory: memoryview | None  # The destination; None: use it in place.
  moved: float
  received: int = 0


@dataclasses.dataclass(slots=True)
class _Outgoing:
  """An array that is sent.

  Its parts are taken from the front as their bytes are handed over for writing.
  """

  parts: list[memoryview]
  nbytes: int
  sends: bool = False  # Whether pieces of it are still to be written.
  region: shared_memory.Region | None = None  # Set if it is lent.
  cancelled: bool = False

  def take(self, nbytes: int) -> list[memoryview]:
    """Takes at most so many of its bytes from the front."""
    found = []
    while nbytes and self.parts:
      first = self.parts.pop(0)
      piece = first[:nbytes]
      found.append(piece)
      nbytes -= piece.nbytes
      if piece.nbytes < first.nbytes:
        self.parts.insert(0, first[piece.nbytes :])
    return found


class Session:
  """One side of a connection.

  Attributes:
    peer: the other side's name.
    process: the peer's process, if it is on this host; 0 otherwise.
    backlog: bytes of frames that wait to be written.
    ended: why the peer said goodbye; None if it didn't.
  """

  def __init__(
    self,
    peer: str,
    pool: shared_memory.Pool,
    emit: Callable[[interface.Event], None],
    now: Callable[[], float] = time.monotonic,
  ):
    """Creates a session that waits for its connection.

    Args:
      peer: the other side's name.
      pool: buffers that can be lent.
      emit: called with each event.
      now: the transport's clock.
    """
    self.peer = peer
    self.process = 0
    self.backlog = 0
    self.ended: str | None = None
    self._pool = pool
    self._emit = emit
    self._now = now
    self._keys: tuple[bytes, bytes] | None = None
    self._sent_frames = self._received_frames = 0
    # Sending.
    self._frames: collections.deque[tuple[int, int, bytes]] = (
      collections.deque()
    )
    self._writing: list[memoryview | bytes] = []
    self._finishing: int | None = None
    # In the order of their turns.
    self._outgoing: dict[int, _Outgoing] = {}
    # Receiving.
    self._staging = memoryview(bytearray(STAGING))
    self._start = self._end = 0
    self._scratch: memoryview | None = None
    self._sink: _Incoming | None = None
    self._sink_id = 0
    self._left = 0
    self._incoming: dict[int, _Incoming] = {}
    self._mapped: dict[int, np.ndarray] = {}
    # Arrays that this side reads in the peer's memory.
    self._reading: set[int] = set()
    # What the peer expects and this side does not send yet, with the size.
    self._ready: dict[int, int] = {}
    # What either side has given up, of which frames may be on their way.
    self._cancelled: dict[int, None] = {}

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
    self._keys, self.process = keys, process
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
    self._put(_MESSAGE, 0, body)

  def ping(self) -> None:
    """Queues a heartbeat, unless other output is queued."""
    if not (self._frames or self._writing):
      self._put(_PING, 0)

  def say_goodbye(self, reason: str) -> None:
    """Fails all transfers, and queues the last frame."""
    for transfer in {**self._outgoing, **self._incoming}:
      self._give_up(transfer, "this side has closed the connection")
    self._put(_BYE, 0, reason.encode()[:500])

  def send_array(
    self,
    transfer: int,
    data: interface.Buffer | Sequence[interface.Buffer],
  ) -> None:
    """See `Transport.send_array`."""
    if isinstance(data, bytes | bytearray | memoryview):
      data = [data]
    parts = [memoryview(part).cast("B") for part in data]
    parts = [part for part in parts if part.nbytes]
    if transfer in self._outgoing:
      raise ValueError(f"Transfer {transfer} to {self.peer!r} is in progress.")
    if transfer in self._cancelled:
      self._fail(transfer, True, "it was cancelled before it was sent")
      return
    size = sum(part.nbytes for part in parts)
    self._outgoing[transfer] = _Outgoing(parts, size)
    if transfer in self._ready:
      self._start_sending(transfer, self._ready.pop(transfer))

  def expect(
    self,
    transfer: int,
    nbytes: int,
    into: interface.Buffer | None,
  ) -> None:
    """See `Transport.expect`."""
    memory = None if into is None else memoryview(into).cast("B")
    if memory is not None and (memory.readonly or memory.nbytes != nbytes):
      raise ValueError(
        f"into must be writable and have {nbytes:,} bytes, has"
        f" {memory.nbytes:,}."
      )
    if transfer in self._incoming:
      raise ValueError(
        f"Transfer {transfer} of {self.peer!r} is expected already."
      )
    if transfer in self._cancelled:
      self._fail(transfer, False, "it was cancelled before it was expected")
      return
    self._incoming[transfer] = _Incoming(nbytes, memory, self._now())
    self._put(_READY, transfer, _WORD.pack(nbytes))

  def pending(self) -> int:
    """See `Transport.pending`."""
    return len(self._outgoing) + len(self._incoming)

  def idle(self, transfer: int) -> float | None:
    """See `Transport.idle`."""
    found = self._incoming.get(transfer)
    return None if found is None else self._now() - found.moved

  def release(self, transfer: int) -> None:
    """See `Transport.release`."""
    if transfer in self._reading:
      self._reading.remove(transfer)
      self._put(_RELEASE, transfer)

  def cancel(self, transfer: int, reason: str = "it was cancelled") -> None:
    """See `Transport.cancel`."""
    self._forget(transfer)
    self._put(_CANCEL, transfer, reason.encode())

  def close(self, reason: str = "") -> None:
    """Fails all transfers, and ends the use of buffers that the peer may read."""
    for transfer, out in list(self._outgoing.items()):
      if out.region is not None:
        out.region.retired = True
      self._end_lending(out)
      if not out.cancelled:
        self._fail(transfer, True, reason)
    for transfer in self._incoming:
      self._fail(transfer, False, reason)
    self._outgoing.clear()
    self._incoming.clear()
    self._mapped.clear()
    self._frames.clear()
    self._writing.clear()
    self._sink = None

  # Writing.

  def output(self) -> list[memoryview | bytes]:
    """The next bytes to write, once it has started; see `sent`."""
    if not self._writing:
      self._gather()
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
    if not writing and self._finishing is not None:
      transfer, self._finishing = self._finishing, None
      out = self._outgoing.pop(transfer, None)
      if out is not None:
        self._emit(interface.ArraySent(self.peer, transfer, out.nbytes))

  def _gather(self) -> None:
    small: list[bytes] = []
    while self._frames and len(small) < 512:
      kind, number, body = self._frames.popleft()
      self.backlog -= len(body) + _HEADER.size
      small += [self._seal(kind, number, body), body]
    if small:
      self._writing.append(b"".join(small))
    for transfer, out in self._outgoing.items():
      if out.sends:
        piece = out.take(PIECE)
        nbytes = sum(part.nbytes for part in piece)
        self._writing += [_HEADER.pack(nbytes, _CHUNK, transfer), *piece]
        if not out.parts:
          out.sends, self._finishing = False, transfer
        self._outgoing[transfer] = self._outgoing.pop(transfer)
        break

  def _start_sending(self, transfer: int, nbytes: int) -> None:
    """The receiver expects the array: lends it if possible, else sends it."""
    out = self._outgoing[transfer]
    if nbytes != out.nbytes:
      sizes = f"{out.nbytes:,} bytes are sent where {nbytes:,} are expected"
      self.cancel(transfer, sizes)
      self._fail(transfer, True, sizes)
      return
    region = None
    if self.process and nbytes >= shared_memory.LEAST and len(out.parts) == 1:
      region = self._pool.find(out.parts[0])
    if region is None or region.file < 0:
      out.sends = True
      return
    out.region = region
    region.readers += 1
    start = shared_memory.address_within(out.parts[0], region)
    place = region.file, region.array.size, region.inode, start
    self._put(_OFFER, transfer, _PLACE.pack(*place))

  def _put(self, kind: int, number: int, body: bytes = b"") -> None:
    self.backlog += len(body) + _HEADER.size
    self._frames.append((kind, number, body))

  def _seal(self, kind: int, number: int, body: bytes) -> bytes:
    head = _HEADER.pack(len(body), kind, number)
    if self._keys is None:
      return head
    text = _WORD.pack(self._sent_frames) + head + body
    self._sent_frames += 1
    return head + hmac.digest(self._keys[0], text, "sha256")[:_TAG]

  # Reading.

  def room(self) -> list[memoryview]:
    """The buffers for the next bytes; see `received`."""
    if self._left:
      return [self._sink_room(), self._staging[:_AHEAD]]
    return [self._staging[self._end :]]

  def received(self, nbytes: int) -> None:
    """Processes bytes that were read.

    Raises:
      Faulty, struct.error: they violate the protocol.
    """
    if self._left:
      taken = min(nbytes, self._left)
      self._advance(taken)
      nbytes -= taken
    self._end += nbytes
    missing = 0
    while self._end - self._start >= _HEADER.size and not missing:
      missing = self._parse()
    # A long message is gathered in a buffer of its size.
    size = max(STAGING, self._end - self._start + missing)
    if self._start or size != len(self._staging):
      rest = bytes(self._staging[self._start : self._end])
      if size != len(self._staging):
        self._staging = memoryview(bytearray(size))
      self._staging[: len(rest)] = rest
      self._start, self._end = 0, len(rest)

  def _sink_room(self) -> memoryview:
    if self._sink is None or self._sink.memory is None:
      if self._scratch is None:
        self._scratch = memoryview(bytearray(PIECE))
      return self._scratch[: self._left]
    start = self._sink.received
    return self._sink.memory[start : start + self._left]

  def _advance(self, nbytes: int) -> None:
    self._left -= nbytes
    sink = self._sink
    if sink is None:
      return
    sink.received += nbytes
    sink.moved = self._now()
    if not self._left:
      self._sink = None
      if sink.received == sink.nbytes:
        assert sink.memory is not None
        del self._incoming[self._sink_id]
        self._emit(
          interface.ArrayReceived(self.peer, self._sink_id, sink.memory)
        )

  def _parse(self) -> int:
    """Processes one frame, or what is here of a piece of an array.

    Returns:
      How many bytes are missing of it; 0 if it was processed.
    """
    start = self._start
    length, kind, number = _HEADER.unpack_from(self._staging, start)
    body = start + _HEADER.size
    if kind == _CHUNK:
      self._begin_piece(number, length)
      # The rest is read directly into its destination.
      taken = min(self._end - body, length)
      self._sink_room()[:taken] = self._staging[body : body + taken]
      self._start = body + taken
      self._advance(taken)
      return 0
    if length > (interface.MAX_MESSAGE if kind == _MESSAGE else 512):
      raise Faulty(f"a frame of kind {kind} with {length:,} bytes")
    if self._keys is not None:
      body += _TAG
    end = body + length
    if end > self._end:
      return end - self._end
    head = bytes(self._staging[start : start + _HEADER.size])
    tag = bytes(self._staging[start + _HEADER.size : body])
    text = bytes(self._staging[body:end])
    self._check(head, tag, text)
    self._start = end
    self._handle(kind, number, text)
    return 0

  def _check(self, head: bytes, tag: bytes, body: bytes) -> None:
    if self._keys is None:  # Frames are not signed.
      return
    text = _WORD.pack(self._received_frames) + head + body
    self._received_frames += 1
    right = hmac.digest(self._keys[1], text, "sha256")[:_TAG]
    if not hmac.compare_digest(right, tag):
      raise Faulty("a frame with a wrong signature")

  def _expected(self, transfer: int) -> _Incoming | None:
    """An array of which something came; None if it was given up."""
    found = self._incoming.get(transfer)
    if found is None and transfer not in self._cancelled:
      raise Faulty(f"array {transfer}, which is not expected")
    return found

  def _begin_piece(self, transfer: int, length: int) -> None:
    found = self._expected(transfer)
    if length > PIECE:
      raise Faulty(f"a piece of {length:,} bytes")
    if found is not None:
      if found.received + length > found.nbytes:
        raise Faulty(f"a piece too many of array {transfer}")
      if found.memory is None:
        found.memory = shared_memory.empty(found.nbytes)
    self._sink, self._sink_id, self._left = found, transfer, length

  def _handle(self, kind: int, number: int, body: bytes) -> None:
    if kind == _MESSAGE:
      self._emit(interface.Message(self.peer, body))
    elif kind == _PING:
      pass
    elif kind == _BYE:
      self.ended = body.decode(errors="replace")
    elif kind == _READY:
      self._peer_expects(number, *_WORD.unpack(body))
    elif kind == _CANCEL:
      self._give_up(number, body.decode(errors="replace"))
    elif kind == _OFFER:
      self._offered(number, *_PLACE.unpack(body))
    elif kind == _RELEASE:
      self._released(number)
    else:
      raise Faulty(f"a frame of unknown kind {kind}")

  def _peer_expects(self, transfer: int, nbytes: int) -> None:
    out = self._outgoing.get(transfer)
    if out is None:
      self._remember(self._ready, transfer, nbytes)
    elif out.region is None:
      self._start_sending(transfer, nbytes)
    else:  # It can't map the buffer.
      self._end_lending(out)
      out.sends = not out.cancelled
      if out.cancelled:
        del self._outgoing[transfer]

  # Shared memory.

  def _offered(
    self, transfer: int, file: int, size: int, inode: int, start: int
  ) -> None:
    found = self._expected(transfer)
    region = self._map(file, size, inode)
    if found is None:
      self._put(_RELEASE, transfer)
    elif region is None:
      self._put(_READY, transfer, _WORD.pack(found.nbytes))
    else:
      self._take_offer(transfer, found, region[start : start + found.nbytes])

  def _map(self, file: int, size: int, inode: int) -> np.ndarray | None:
    """A buffer of the peer; None if it can't be mapped."""
    found = self._mapped.pop(inode, None)
    if found is None:
      try:
        found = shared_memory.map_buffer(self.process, file, size, inode)
      except (OSError, ValueError):
        return None
    self._mapped[inode] = found
    if len(self._mapped) > _MAPPED:
      del self._mapped[next(iter(self._mapped))]
    return found

  def _take_offer(
    self, transfer: int, found: _Incoming, data: np.ndarray
  ) -> None:
    if data.size != found.nbytes:
      raise Faulty("an offer beyond its buffer")
    del self._incoming[transfer]
    memory = data.data
    self._reading.add(transfer)
    if found.memory is not None:
      memory = found.memory
      memory.cast("B")[:] = data.data
      self.release(transfer)
    self._emit(interface.ArrayReceived(self.peer, transfer, memory))

  def _released(self, transfer: int) -> None:
    out = self._outgoing.pop(transfer, None)
    if out is None or out.region is None:
      raise Faulty(f"a release of array {transfer}, which was not lent")
    self._end_lending(out)
    if not out.cancelled:
      self._emit(interface.ArraySent(self.peer, transfer, out.nbytes))

  def _end_lending(self, out: _Outgoing) -> None:
    region, out.region = out.region, None
    if region is not None:
      self._pool.returned(region)

  # The ends of transfers.

  def _give_up(self, transfer: int, reason: str) -> None:
    """Fails a transfer, in both directions."""
    out = self._outgoing.get(transfer)
    sending = out is not None and not out.cancelled
    expecting = transfer in self._incoming
    self._forget(transfer)
    if sending:
      self._fail(transfer, True, reason)
    if expecting:
      self._fail(transfer, False, reason)

  def _forget(self, transfer: int) -> None:
    self._remember(self._cancelled, transfer, None)
    self._ready.pop(transfer, None)
    out = self._outgoing.get(transfer)
    if out is not None and out.region is not None:
      out.cancelled = True  # Its memory is in use until it is released.
    elif out is not None:
      del self._outgoing[transfer]
      # A piece may be half written, and its memory is the caller's from now on.
      self._writing = [bytes(part) for part in self._writing]
    incoming = self._incoming.pop(transfer, None)
    if incoming is not None and self._sink is incoming:
      self._sink = None

  def _remember(self, ids: dict[int, _T], transfer: int, what: _T) -> None:
    ids[transfer] = what
    if len(ids) > _REMEMBERED:
      del ids[next(iter(ids))]

  def _fail(self, transfer: int, sending: bool, reason: str) -> None:
    self._emit(interface.ArrayFailed(self.peer, transfer, sending, reason))
