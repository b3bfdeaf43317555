"""The arrays that one side of a connection receives; see `session`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from optax_dist.coordinator.transport import interface, shared_memory
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.coordinator.transport.frames import PIECE, WORD, Faulty, Kind
from optax_dist.coordinator.transport.sending import Remembered

if TYPE_CHECKING:
  import numpy as np

_MAPPED = 32  # Buffers of the peer.


@dataclasses.dataclass(slots=True)
class _Incoming:
  """An array that is expected.

  Attributes:
    memory: where its bytes are received.
    in_place: whether it may instead be read in the sender's memory.
    moved: when its last byte arrived.
    received: how many of its bytes have arrived.
  """

  memory: memoryview
  in_place: bool
  moved: float
  received: int = 0


class Receiving:
  """The arrays that one side receives, each into memory that was given for it.

  Attributes:
    process: the peer's process, if it is on this host; 0 otherwise.
    left: bytes that are missing of the piece that is being read.
  """

  def __init__(
    self,
    peer: str,
    emit: Callable[[interface.Event], None],
    put: Callable[[Kind, int, bytes], None],
    clock: AwakeClock,
  ):
    """Starts without any.

    Args:
      peer: the other side's name.
      emit: called with each event.
      put: queues a frame.
      clock: the transport's.
    """
    self.process = self.left = 0
    self._peer, self._emit, self._put, self._clock = peer, emit, put, clock
    self._arrays: dict[int, _Incoming] = {}
    self._cancelled = Remembered()
    # The transfer whose piece is being read; pieces of cancelled ones are discarded.
    self._current = 0
    self._nowhere: memoryview | None = None
    # Buffers of the peer by their inodes, the one that was used last at the end;
    # and the arrays that are read there.
    self._mapped: dict[int, np.ndarray] = {}
    self._reading: set[int] = set()

  def __len__(self) -> int:
    return len(self._arrays)

  def expect(
    self, transfer: int, into: interface.Buffer, in_place: bool
  ) -> None:
    """See `Transport.expect`."""
    memory = memoryview(into).cast("B")
    if transfer in self._cancelled:
      self._fail(transfer, "it was cancelled before it was expected")
      return
    self._arrays[transfer] = _Incoming(memory, in_place, self._clock.time)
    self._put(Kind.READY, transfer, WORD.pack(memory.nbytes))

  def idle(self, transfer: int) -> float | None:
    """See `Transport.idle`."""
    array = self._arrays.get(transfer)
    return None if array is None else self._clock.time - array.moved

  def release(self, transfer: int) -> None:
    """See `Transport.release`."""
    if transfer in self._reading:
      self._reading.remove(transfer)
      self._put(Kind.RELEASE, transfer, b"")

  def cancel(self, transfer: int, reason: str | None) -> None:
    """See `Sending.cancel`."""
    self._cancelled[transfer] = 0
    if self._arrays.pop(transfer, None) is not None and reason is not None:
      self._fail(transfer, reason)

  def cancel_all(self, reason: str) -> None:
    """Gives up all transfers."""
    for transfer in list(self._arrays):
      self.cancel(transfer, reason)

  def close(self, reason: str) -> None:
    """Fails all transfers."""
    for transfer in self._arrays:
      self._fail(transfer, reason)
    self._arrays.clear()
    self._mapped.clear()

  # Pieces.

  def begin_piece(self, transfer: int, length: int) -> None:
    """A piece of an array follows, to be read into `room`.

    Raises:
      Faulty: it is not expected, or too long.
    """
    array = self._expected(transfer)
    if length > PIECE:
      raise Faulty(f"a piece of {length:,} bytes")
    if array is not None and array.received + length > array.memory.nbytes:
      raise Faulty(f"a piece too many of array {transfer}")
    self._current, self.left = transfer, length

  def room(self) -> memoryview:
    """Where the rest of the piece goes."""
    array = self._arrays.get(self._current)
    if array is None:
      if self._nowhere is None:
        self._nowhere = memoryview(bytearray(PIECE))
      return self._nowhere[: self.left]
    return array.memory[array.received : array.received + self.left]

  def advance(self, nbytes: int) -> None:
    """So many bytes of the piece were read."""
    self.left -= nbytes
    array = self._arrays.get(self._current)
    if array is None:
      return
    array.received += nbytes
    array.moved = self._clock.time
    if not self.left and array.received == array.memory.nbytes:
      self._finish(self._current, array.memory)

  # Shared memory.

  def offered(
    self, transfer: int, file: int, size: int, inode: int, start: int
  ) -> None:
    """An array is in a buffer of the peer.

    Raises:
      Faulty: it is not expected, or beyond its buffer.
    """
    array = self._expected(transfer)
    region = self._map(file, size, inode)
    if array is None:
      self._put(Kind.RELEASE, transfer, b"")
      return
    if region is None:
      self._put(Kind.READY, transfer, WORD.pack(array.memory.nbytes))
      return
    data = region[start : start + array.memory.nbytes].data
    if data.nbytes != array.memory.nbytes:
      raise Faulty("an offer beyond its buffer")
    self._reading.add(transfer)
    if not array.in_place:
      array.memory[:] = data
      self.release(transfer)
      data = array.memory
    self._finish(transfer, data)

  def _map(self, file: int, size: int, inode: int) -> np.ndarray | None:
    """A buffer of the peer; None if it can't be mapped."""
    region = self._mapped.pop(inode, None)
    if region is None:
      try:
        region = shared_memory.map_buffer(self.process, file, size, inode)
      except (OSError, ValueError):
        return None
    self._mapped[inode] = region
    if len(self._mapped) > _MAPPED:
      del self._mapped[next(iter(self._mapped))]
    return region

  def _expected(self, transfer: int) -> _Incoming | None:
    """The array to which a frame belongs; None if it was cancelled."""
    array = self._arrays.get(transfer)
    if array is None and transfer not in self._cancelled:
      raise Faulty(f"array {transfer}, which is not expected")
    return array

  def _finish(self, transfer: int, data: memoryview) -> None:
    del self._arrays[transfer]
    self._emit(interface.ArrayReceived(self._peer, transfer, data))

  def _fail(self, transfer: int, reason: str) -> None:
    self._emit(interface.ArrayFailed(self._peer, transfer, False, reason))
