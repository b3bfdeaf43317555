"""The frames of one connection, after the handshake.

Frames carry messages and pieces of arrays in turn; bytes in and bytes out, no
sockets. An array takes one of two ways:

    sender                               receiver
    send_array                           expect
        |  <----------- READY ---------------|   first, if it is larger than `EAGER`
        |  ------------ ARRAY, its size ---->|
        |  ------------ CHUNK, CHUNK ... --->|   into the memory passed to `expect`
    ArraySent                            ArrayReceived

    on one host, if it is in memory of `allocate`
        |  ------------ REGION, its file --->|   once for each buffer, until DROP
        |  ------------ OFFER, the place --->|   copied, or read where it is
        |  <----------- RELEASE -------------|
    ArraySent                            ArrayReceived

CANCEL ends either, in both directions; UNMAPPED turns the second into the first.
Each frame is a header (length, kind, id), a tag if frames are signed,
and a body. The tag is HMAC-SHA256 over the frame's sequence number, its header
and its body; for an array's pieces the body is left out.
"""

from __future__ import annotations

import collections
import dataclasses
import hmac
import os
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from optax_dist.coordinator.transport import interface, shared_memory

EAGER = 1 << 20  # Size of an array that may be sent before it is expected.
# Bytes of an array in one frame, for which messages wait: more (by the step) while
# one is written in so many seconds, half otherwise, as TCP adapts its window.
PIECE = 1 << 20
_STEP, _BRIEF = 128 << 10, 0.005
_BUDGET = 4 * EAGER  # The same for all arrays of a connection.
_LEAST = 4096  # The minimum that each array counts for there.
_REMEMBERED = 16384  # Transfers to remember before both halves are known.
_REGIONS = 1024
STAGING = 64 << 10
_AHEAD = 128  # Bytes to read beyond a piece of an array: the next header.

_HEADER = struct.Struct("<IBQ")
_WORD = struct.Struct("<Q")
_PLACE = struct.Struct("<QQQ")
_REGION_BODY = struct.Struct("<QQ")
_TAG = 16
(
  _MESSAGE,
  _PING,
  _BYE,
  _ARRAY,  # An array starts; its size.
  _CHUNK,
  _READY,  # An array is expected.
  _CANCEL,
  _REGION,  # A buffer's descriptor is attached; its size and inode.
  _UNMAPPED,  # The buffer could not be mapped: send the arrays offered in it.
  _DROP,  # A buffer was freed.
  _OFFER,  # An array is in a buffer; which, where, how long.
  _RELEASE,
) = range(12)


class Faulty(Exception):
  """The peer violated the protocol."""


@dataclasses.dataclass(slots=True)
class _Incoming:
  """An array that is expected, or that came before that."""

  nbytes: int
  memory: memoryview | None  # The destination; None: use it in place.
  expected: bool
  begun: bool = False
  received: int = 0
  moved: float = 0.0
  lent: tuple[int, int] | None = None  # The peer's buffer, and the offset.


@dataclasses.dataclass(slots=True)
class _Outgoing:
  """An array that is sent.

  Its parts are taken from the front as their bytes are handed over for writing.
  """

  parts: list[memoryview]
  nbytes: int
  ready: bool
  begun: bool = False
  taken: int = 0  # Bytes that were handed over for writing.
  region: shared_memory.Region | None = None  # Set if it is lent.
  cancelled: bool = False

  def take(self, nbytes: int) -> list[memoryview]:
    """Takes so many of its bytes from the front."""
    self.taken += nbytes
    found = []
    while nbytes:
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
    near: whether the peer may map this process's memory.
    backlog: bytes of frames that wait to be written.
    ended: why the peer said goodbye; None if it didn't.
    file: the descriptor that goes with the next bytes of `output`.
  """

  def __init__(
    self,
    peer: str,
    pool: shared_memory.Pool,
    emit: Callable[[interface.Event], None],
    connected: Callable[[], bool] = lambda: True,
    now: Callable[[], float] = time.monotonic,
  ):
    """Creates a session that waits for its connection.

    Args:
      peer: the other side's name.
      pool: buffers that can be lent.
      emit: called with each event.
      connected: whether the peer is currently not lost; its memory is valid for
        as long.
      now: the transport's clock.
    """
    self.peer = peer
    self.near = self._lends = False
    self.backlog = 0
    self.ended: str | None = None
    self.file: int | None = None
    self._pool = pool
    self._emit = emit
    self._connected = connected
    self._now = now
    self._keys: tuple[bytes, bytes] | None = None
    self._started = False
    self._sent_frames = self._received_frames = 0
    # Sending.
    self._frames: collections.deque[tuple[int, int, bytes, int | None]] = (
      collections.deque()
    )
    self._writing: list[memoryview | bytes] = []
    self._finishing: int | None = None
    self._piece = min(2 * _STEP, PIECE)
    self._piece_began: float | None = None
    # In the order of their turns.
    self._outgoing: dict[int, _Outgoing] = {}
    self._early_sent: dict[int, int] = {}
    self._shown: set[int] = set()
    # Receiving.
    self._staging = memoryview(bytearray(STAGING))
    self._start = self._end = 0
    self._scratch: memoryview | None = None
    self._sink: _Incoming | None = None
    self._sink_id = 0
    self._left = 0
    self._incoming: dict[int, _Incoming] = {}
    self._early = 0
    self._lent: dict[int, np.ndarray] = {}
    self._mapped: dict[int, np.ndarray | None] = {}
    self._files: collections.deque[int] = collections.deque()
    # Ids that were expected or cancelled before the sender's frame came.
    self._ready: dict[int, None] = {}
    self._dead: dict[int, None] = {}

  def start(self, keys: tuple[bytes, bytes] | None, near: bool) -> None:
    """Starts the session: the connection is up.

    Args:
      keys: to sign outgoing frames and check incoming ones; None for neither.
      near: whether both processes are on the same host.
    """
    self._keys, self.near, self._lends = keys, near, near
    self._started = True
    for transfer, out in self._outgoing.items():
      self._offer(transfer, out)

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
    size = sum(part.nbytes for part in parts)
    if transfer in self._outgoing:
      raise ValueError(f"Transfer {transfer} to {self.peer!r} is in progress.")
    if transfer in self._dead:
      del self._dead[transfer]
      self._fail(transfer, True, "the receiver does not want it")
      return
    out = _Outgoing(parts, size, transfer in self._ready)
    self._ready.pop(transfer, None)
    self._outgoing[transfer] = out
    self._offer(transfer, out)

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
    if transfer in self._dead:
      del self._dead[transfer]
      self._fail(transfer, False, "its sender has given it up")
      return
    found = self._incoming.get(transfer)
    if found is None:
      self._incoming[transfer] = found = _Incoming(nbytes, memory, True)
    elif found.expected:
      raise ValueError(
        f"Transfer {transfer} of {self.peer!r} is expected already."
      )
    else:
      found.expected = True
      if found.lent is None:
        self._early -= _cost(found.nbytes)
      if found.nbytes != nbytes:
        self._wrong_size(transfer, found.nbytes, nbytes)
        return
      if memory is not None:
        if found.memory is not None:
          memory[: found.received] = found.memory[: found.received]
        found.memory = memory
    found.moved = self._now()
    if found.lent is not None:
      self._take_offer(transfer, found)
      return
    self._put(_READY, transfer)
    self._check_whole(transfer, found)

  def progress(self, transfer: int) -> interface.Progress | None:
    """See `Transport.progress`."""
    found = self._incoming.get(transfer)
    if found is None or not found.expected:
      return None
    return interface.Progress(found.received, self._now() - found.moved)

  def release(self, transfer: int) -> None:
    """Called when this side has finished reading an array lent to it."""
    if self._lent.pop(transfer, None) is not None:
      self._put(_RELEASE, transfer)

  def cancel(self, transfer: int) -> None:
    """See `Transport.cancel`."""
    self._forget(transfer)
    self._remember(self._dead, transfer)
    self._put(_CANCEL, transfer)

  def drop_region(self, number: int) -> None:
    """Tells the peer that a buffer of this process was freed."""
    if number in self._shown:
      self._shown.remove(number)
      self._put(_DROP, number)

  def close(self, reason: str = "") -> None:
    """Fails all transfers, and returns lent buffers."""
    for transfer, out in list(self._outgoing.items()):
      self._end_lending(out)
      if not out.cancelled:
        self._fail(transfer, True, reason)
    for transfer, incoming in list(self._incoming.items()):
      if incoming.expected:
        self._fail(transfer, False, reason)
    self._outgoing.clear()
    self._incoming.clear()
    self._lent.clear()
    self._mapped.clear()
    self._frames.clear()
    self._writing.clear()
    self._sink = None
    while self._files:
      os.close(self._files.popleft())

  # Writing.

  def output(self) -> list[memoryview | bytes]:
    """The next bytes to write; see `sent`."""
    if not self._writing and self._started:
      self._gather()
    return self._writing

  def sent(self, nbytes: int) -> None:
    """Reports how many bytes of `output` were written."""
    self.file = None
    writing = self._writing
    while nbytes:
      first = len(writing[0])
      if nbytes < first:
        writing[0] = memoryview(writing[0])[nbytes:]
        return
      nbytes -= first
      del writing[0]
    if not writing and self._piece_began is not None:
      brief = self._now() - self._piece_began < _BRIEF
      self._piece_began = None
      more, less = self._piece + _STEP, self._piece // 2
      self._piece = min(PIECE, more if brief else max(_STEP, less))
    if not writing and self._finishing is not None:
      transfer, self._finishing = self._finishing, None
      out = self._outgoing.get(transfer)
      if out is not None and out.taken == out.nbytes:
        del self._outgoing[transfer]
        self._emit(interface.ArraySent(self.peer, transfer))

  def _gather(self) -> None:
    small: list[bytes] = []
    while self._frames and len(small) < 512:
      kind, number, body, file = self._frames[0]
      if file is not None:
        if small:
          break  # A descriptor is sent with the first byte of a write.
        self.file = file
      self._frames.popleft()
      self.backlog -= len(body) + _HEADER.size
      small += [self._seal(kind, number, len(body), body), body]
    if small:
      self._writing.append(b"".join(small))
    for transfer, out in self._outgoing.items():
      if self._gather_piece(transfer, out):
        self._outgoing[transfer] = self._outgoing.pop(transfer)
        break

  def _gather_piece(self, transfer: int, out: _Outgoing) -> bool:
    """Queues a piece of the array, if one may be sent."""
    size = out.nbytes
    if out.region is not None or (out.begun and out.taken == size):
      return False
    if not out.begun:
      if not out.ready:
        early = sum(self._early_sent.values())
        if size > EAGER or early + _cost(size) > _BUDGET:
          return False
        self._early_sent[transfer] = _cost(size)
      out.begun = True
      raw = _WORD.pack(size)
      self._writing += [self._seal(_ARRAY, transfer, len(raw), raw), raw]
    end = min(size, out.taken + self._piece)
    if size:
      self._piece_began = self._now()
      head = self._seal(_CHUNK, transfer, end - out.taken, b"")
      self._writing += [head, *out.take(end - out.taken)]
    if end == size:
      self._finishing = transfer
    return True

  def _offer(self, transfer: int, out: _Outgoing) -> None:
    """Lends the array instead of sending it, if its memory can be shared."""
    if not self._lends or out.nbytes < shared_memory.LEAST:
      return
    if len(out.parts) > 1:
      return
    (data,) = out.parts
    region = self._pool.find(data)
    if region is None or region.file < 0:
      return
    out.begun, out.region = True, region
    region.lent += 1
    if region.number not in self._shown:
      self._shown.add(region.number)
      raw = _REGION_BODY.pack(region.array.size, region.inode)
      self._put(_REGION, region.number, raw, region.file)
    start = shared_memory.address_within(data, region)
    self._put(_OFFER, transfer, _PLACE.pack(region.number, start, out.nbytes))

  def _put(
    self, kind: int, number: int, body: bytes = b"", file: int | None = None
  ) -> None:
    self.backlog += len(body) + _HEADER.size
    self._frames.append((kind, number, body, file))

  def _seal(self, kind: int, number: int, length: int, body: bytes) -> bytes:
    head = _HEADER.pack(length, kind, number)
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

  def received(self, nbytes: int, files: Sequence[int] = ()) -> None:
    """Processes bytes that were read, and descriptors that came with them.

    Raises:
      Faulty: they violate the protocol.
    """
    self._files.extend(files)
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

  def feed(self, data: bytes) -> None:
    """Processes bytes that were read with the handshake."""
    while data:
      room = self.room()[0]
      taken = min(len(data), room.nbytes)
      room[:taken] = data[:taken]
      self.received(taken)
      data = data[taken:]

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
      self._check_whole(self._sink_id, sink)

  def _parse(self) -> int:
    """Processes one frame, or what is here of a piece of an array.

    Returns:
      How many bytes are missing of it; 0 if it was processed.
    """
    start = self._start
    length, kind, number = _HEADER.unpack_from(self._staging, start)
    body = start + _HEADER.size
    if self._keys is not None:
      body += _TAG
    most = interface.MAX_MESSAGE if kind == _MESSAGE else 512
    if kind != _CHUNK and length > most:
      raise Faulty(f"a frame of kind {kind} with {length:,} bytes")
    end = body if kind == _CHUNK else body + length
    if end > self._end:
      return end - self._end
    head = bytes(self._staging[start : start + _HEADER.size])
    tag = bytes(self._staging[start + _HEADER.size : body])
    text = bytes(self._staging[body:end])
    self._check(head, tag, text)
    self._start = end
    if kind != _CHUNK:
      self._handle(kind, number, text)
      return 0
    self._begin_piece(number, length)
    # The rest is read directly into its destination.
    taken = min(self._end - end, length)
    self._sink_room()[:taken] = self._staging[end : end + taken]
    self._start += taken
    self._advance(taken)
    return 0

  def _check(self, head: bytes, tag: bytes, body: bytes) -> None:
    if self._keys is None:  # Frames are not signed.
      return
    text = _WORD.pack(self._received_frames) + head + body
    self._received_frames += 1
    right = hmac.digest(self._keys[1], text, "sha256")[:_TAG]
    if not hmac.compare_digest(right, tag):
      raise Faulty("a frame with a wrong signature")

  def _begin_piece(self, transfer: int, length: int) -> None:
    found = self._incoming.get(transfer)
    if not 0 < length <= PIECE:
      raise Faulty(f"a piece of {length:,} bytes")
    self._sink, self._sink_id, self._left = found, transfer, length
    if found is None:
      if transfer not in self._dead:
        raise Faulty(f"a piece of an unknown array {transfer}")
    elif (
      not found.begun
      or found.memory is None
      or (found.received + length > found.memory.nbytes)
    ):
      raise Faulty(f"a piece too many of array {transfer}")

  def _handle(self, kind: int, number: int, body: bytes) -> None:
    if kind == _MESSAGE:
      self._emit(interface.Message(self.peer, body))
    elif kind == _PING:
      pass
    elif kind == _BYE:
      self.ended = body.decode(errors="replace")
    elif kind == _ARRAY:
      if len(body) != _WORD.size:
        raise Faulty("a number that can't be read")
      self._begin(number, *_WORD.unpack(body))
    elif kind == _READY:
      early = self._early_sent.pop(number, None)
      if number in self._outgoing:
        self._outgoing[number].ready = True
      elif early is None:
        self._remember(self._ready, number)
    elif kind == _CANCEL:
      self._give_up(number, "the other side has given it up")
    elif kind == _REGION:
      if len(body) != _REGION_BODY.size:
        raise Faulty("a buffer that can't be read")
      self._map(number, *_REGION_BODY.unpack(body))
    elif kind == _UNMAPPED:
      self._send_instead(number)
    elif kind == _DROP:
      self._mapped.pop(number, None)
    elif kind == _OFFER:
      self._offered(number, body)
    elif kind == _RELEASE:
      self._released(number)
    else:
      raise Faulty(f"a frame of unknown kind {kind}")

  def _begin(self, transfer: int, nbytes: int) -> None:
    if transfer in self._dead:
      return
    found = self._incoming.get(transfer)
    if found is None:
      self._early += _cost(nbytes)
      if nbytes > EAGER or self._early > _BUDGET:
        raise Faulty("too much of arrays that are not expected")
      memory = np.empty(nbytes, np.uint8).data
      self._incoming[transfer] = _Incoming(nbytes, memory, False, begun=True)
      return
    if found.begun:
      raise Faulty(f"array {transfer} twice")
    found.begun = True
    if found.nbytes != nbytes:
      self._wrong_size(transfer, nbytes, found.nbytes)
      return
    if found.memory is None:
      found.memory = np.empty(nbytes, np.uint8).data
    self._check_whole(transfer, found)

  def _check_whole(self, transfer: int, found: _Incoming) -> None:
    if found.expected and found.begun and found.received == found.nbytes:
      self._incoming.pop(transfer, None)
      assert found.memory is not None
      self._emit(interface.ArrayReceived(self.peer, transfer, found.memory))

  def _wrong_size(self, transfer: int, sent: int, expected: int) -> None:
    self.cancel(transfer)
    self._fail(
      transfer,
      False,
      f"{sent:,} bytes were sent where {expected:,} were expected",
    )

  # Shared memory.

  def _map(self, number: int, nbytes: int, inode: int) -> None:
    if len(self._mapped) >= _REGIONS or number in self._mapped:
      raise Faulty("too many buffers")
    file = self._files.popleft() if self._files else -1
    try:
      if file < 0 or not self.near:
        raise OSError("no descriptor came")
      self._mapped[number] = shared_memory.map_file(file, nbytes, inode)
    except (OSError, ValueError):
      self._mapped[number] = None
      self._put(_UNMAPPED, number)
    finally:
      if file >= 0:
        os.close(file)

  def _offered(self, transfer: int, body: bytes) -> None:
    if len(body) != _PLACE.size:
      raise Faulty("an offer that can't be read")
    number, start, nbytes = _PLACE.unpack(body)
    if number not in self._mapped:
      raise Faulty("an offer in an unknown buffer")
    region = self._mapped[number]
    if region is None:
      return  # It comes in pieces, as requested from the sender.
    if start + nbytes > region.size:
      raise Faulty("an offer beyond its buffer")
    if transfer in self._dead:
      self._put(_RELEASE, transfer)
      return
    found = self._incoming.get(transfer)
    if found is None:
      if len(self._incoming) > _REMEMBERED:
        raise Faulty("too many offers")
      found = _Incoming(nbytes, None, False, begun=True)
      self._incoming[transfer] = found
    elif found.begun:
      raise Faulty(f"array {transfer} twice")
    found.begun, found.lent = True, (number, start)
    if found.expected and found.nbytes != nbytes:
      self._wrong_size(transfer, nbytes, found.nbytes)
    elif found.expected:
      self._take_offer(transfer, found)

  def _take_offer(self, transfer: int, found: _Incoming) -> None:
    assert found.lent is not None
    number, start = found.lent
    region = self._mapped[number]
    assert region is not None
    data = region[start : start + found.nbytes]
    del self._incoming[transfer]
    if found.memory is None:
      self._lent[transfer] = data
      memory = data.data
    else:
      memory = found.memory
      np.copyto(np.frombuffer(memory, np.uint8), data)
      if not self._connected():
        # It may have reused the memory meanwhile.
        self._fail(transfer, False, "its sender was lost as it was read")
        return
      self._put(_RELEASE, transfer)
    self._emit(interface.ArrayReceived(self.peer, transfer, memory))

  def _released(self, transfer: int) -> None:
    out = self._outgoing.pop(transfer, None)
    if out is None or out.region is None:
      raise Faulty(f"a release of array {transfer}, which was not lent")
    self._end_lending(out)
    if not out.cancelled:
      self._emit(interface.ArraySent(self.peer, transfer))

  def _send_instead(self, number: int) -> None:
    """The peer can't map the buffer: send the arrays offered in it."""
    self._lends = False
    for transfer, out in list(self._outgoing.items()):
      if out.region is not None and out.region.number == number:
        self._end_lending(out)
        if out.cancelled:
          del self._outgoing[transfer]
        else:
          out.begun = False

  def _end_lending(self, out: _Outgoing) -> None:
    region, out.region = out.region, None
    if region is not None:
      self._pool.returned(region)

  # The ends of transfers.

  def _give_up(self, transfer: int, reason: str) -> None:
    """Fails a transfer, in both directions."""
    out, incoming = self._outgoing.get(transfer), self._incoming.get(transfer)
    sending = out is not None and not out.cancelled
    expecting = incoming is not None and incoming.expected
    self._forget(transfer)
    self._remember(self._dead, transfer)
    if sending:
      self._fail(transfer, True, reason)
    if expecting:
      self._fail(transfer, False, reason)

  def _forget(self, transfer: int) -> None:
    self._ready.pop(transfer, None)
    self._early_sent.pop(transfer, None)
    out = self._outgoing.get(transfer)
    if out is not None and out.region is not None:
      out.cancelled = True  # Its memory is in use until it is released.
    elif out is not None:
      del self._outgoing[transfer]
      # A piece may be half written, and its memory is the caller's from now on.
      self._writing = [bytes(part) for part in self._writing]
    incoming = self._incoming.pop(transfer, None)
    if incoming is None:
      return
    if incoming.lent is not None:
      self._put(_RELEASE, transfer)
    elif not incoming.expected:
      self._early -= _cost(incoming.nbytes)
    if self._sink is incoming:
      self._sink = None

  def _remember(self, ids: dict[int, None], transfer: int) -> None:
    ids[transfer] = None
    if len(ids) > _REMEMBERED:
      del ids[next(iter(ids))]

  def _fail(self, transfer: int, sending: bool, reason: str) -> None:
    self._emit(interface.ArrayFailed(self.peer, transfer, sending, reason))


def _cost(nbytes: int) -> int:
  return max(_LEAST, nbytes)
