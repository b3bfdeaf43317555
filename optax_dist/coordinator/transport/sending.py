"""The arrays that one side of a connection sends; see `session`."""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Callable, Sequence

from optax_dist.coordinator.transport import interface, shared_memory
from optax_dist.coordinator.transport.frames import (
  HEADER,
  PIECE,
  Faulty,
  Kind,
)

PLACE = struct.Struct("<QQQQ")
# How many transfers are remembered that only one side has begun, or has cancelled.
REMEMBERED = 16384


class Remembered(dict[int, int]):
  """Numbers of the latest transfers of which something is to be remembered."""

  def __setitem__(self, transfer: int, number: int) -> None:
    super().__setitem__(transfer, number)
    if len(self) > REMEMBERED:
      del self[next(iter(self))]


@dataclasses.dataclass(slots=True)
class _Outgoing:
  """An array that is sent.

  Attributes:
    parts: its bytes that were not handed over for writing yet, in order.
    nbytes: its size.
    region: the buffer that the peer reads; None if it doesn't.
    cancelled: whether only its buffer is still in use.
  """

  parts: list[memoryview]
  nbytes: int
  region: shared_memory.Region | None = None
  cancelled: bool = False

  def pop(self, nbytes: int) -> list[memoryview]:
    """At most so many of its bytes, from the front."""
    popped = []
    while nbytes and self.parts:
      first = self.parts.pop(0)
      piece = first[:nbytes]
      popped.append(piece)
      nbytes -= piece.nbytes
      if piece.nbytes < first.nbytes:
        self.parts.insert(0, first[piece.nbytes :])
    return popped


class Sending:
  """The arrays that one side sends, each once its receiver expects it.

  Attributes:
    shares: whether the peer can read buffers of this process.
    queue: the arrays whose pieces are being written, in order.
    finishing: the arrays whose last piece is being written.
  """

  def __init__(
    self,
    peer: str,
    pool: shared_memory.Pool,
    emit: Callable[[interface.Event], None],
    put: Callable[[Kind, int, bytes], None],
  ):
    """Starts without any.

    Args:
      peer: the other side's name.
      pool: the buffers of this process.
      emit: called with each event.
      put: queues a frame.
    """
    self.shares = False
    self._peer, self._pool, self._emit, self._put = peer, pool, emit, put
    self._arrays: dict[int, _Outgoing] = {}
    self.queue: collections.deque[int] = collections.deque()
    self.finishing: list[int] = []
    # The sizes of arrays that the peer expects and this side does not send yet.
    self._expected = Remembered()
    self._cancelled = Remembered()

  def __len__(self) -> int:
    return len(self._arrays)

  def send(
    self,
    transfer: int,
    data: interface.Buffer | Sequence[interface.Buffer],
  ) -> None:
    """See `Transport.send_array`."""
    if isinstance(data, bytes | bytearray | memoryview):
      data = [data]
    parts = [memoryview(part).cast("B") for part in data]
    parts = [part for part in parts if part.nbytes]
    if transfer in self._cancelled:
      self._fail(transfer, "it was cancelled before it was sent")
      return
    size = sum(part.nbytes for part in parts)
    self._arrays[transfer] = _Outgoing(parts, size)
    if transfer in self._expected:
      self._begin(transfer, self._expected.pop(transfer))

  def expected(self, transfer: int, nbytes: int) -> None:
    """The peer expects an array."""
    out = self._arrays.get(transfer)
    if out is None:
      self._expected[transfer] = nbytes
    elif out.region is None:
      self._begin(transfer, nbytes)
    else:  # The peer can't map the buffer.
      self._returned(out)
      if out.cancelled:
        del self._arrays[transfer]
      else:
        self.queue.append(transfer)

  def released(self, transfer: int) -> None:
    """The peer has read an array in its buffer.

    Raises:
      Faulty: it was not offered.
    """
    out = self._arrays.pop(transfer, None)
    if out is None or out.region is None:
      raise Faulty(f"a release of array {transfer}, which was not offered")
    self._returned(out)
    if not out.cancelled:
      self._emit(interface.ArraySent(self._peer, transfer, out.nbytes))

  def next_pieces(self) -> list[memoryview | bytes]:
    """The bytes to write next, of as many arrays as fit into one piece."""
    output: list[memoryview | bytes] = []
    room = PIECE
    while self.queue and room > 0:
      transfer = self.queue[0]
      out = self._arrays[transfer]
      piece = out.pop(room)
      nbytes = sum(part.nbytes for part in piece)
      room -= nbytes + HEADER.size
      output += [HEADER.pack(nbytes, Kind.CHUNK, transfer), *piece]
      if not out.parts:
        self.queue.popleft()
        self.finishing.append(transfer)
    return output

  def written(self) -> None:
    """All that `next_pieces` has returned is written."""
    finished, self.finishing = self.finishing, []
    for transfer in finished:
      out = self._arrays.pop(transfer)
      self._emit(interface.ArraySent(self._peer, transfer, out.nbytes))

  def cancel(self, transfer: int, reason: str | None) -> None:
    """Gives up a transfer, begun or not.

    Args:
      transfer: its id.
      reason: reason of the `ArrayFailed`; None for no event.
    """
    self._cancelled[transfer] = 0
    self._expected.pop(transfer, None)
    out = self._arrays.get(transfer)
    if out is None or out.cancelled:
      return
    if out.region is not None:
      out.cancelled = True  # Its memory is in use until it is released.
    else:
      del self._arrays[transfer]
      for ids in (self.queue, self.finishing):
        if transfer in ids:
          ids.remove(transfer)
    if reason is not None:
      self._fail(transfer, reason)

  def cancel_all(self, reason: str) -> None:
    """Gives up all transfers."""
    for transfer in list(self._arrays):
      self.cancel(transfer, reason)

  def close(self, reason: str) -> None:
    """Fails all transfers; buffers that the peer may still read are retired."""
    for transfer, out in self._arrays.items():
      if out.region is not None:
        out.region.retired = True
        self._returned(out)
      if not out.cancelled:
        self._fail(transfer, reason)
    self._arrays.clear()
    self.queue.clear()

  def _begin(self, transfer: int, nbytes: int) -> None:
    """The receiver expects the array: shares it if possible, else sends it."""
    out = self._arrays[transfer]
    if nbytes != out.nbytes:
      sizes = f"{out.nbytes:,} bytes are sent where {nbytes:,} are expected"
      self._put(Kind.CANCEL, transfer, sizes.encode())
      self.cancel(transfer, sizes)
      return
    region = None
    if self.shares and nbytes >= shared_memory.LEAST and len(out.parts) == 1:
      region = self._pool.find(out.parts[0])
    if region is None or region.file < 0:
      self.queue.append(transfer)
      return
    out.region = region
    region.readers += 1
    start = shared_memory.address_within(out.parts[0], region)
    location = region.file, region.array.size, region.inode, start
    self._put(Kind.OFFER, transfer, PLACE.pack(*location))

  def _returned(self, out: _Outgoing) -> None:
    assert out.region is not None
    self._pool.returned(out.region)
    out.region = None

  def _fail(self, transfer: int, reason: str) -> None:
    self._emit(interface.ArrayFailed(self._peer, transfer, True, reason))
