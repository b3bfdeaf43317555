"""Complete states for a replica that has joined, or fell too far behind.

A state is sent in pieces, without a copy of its arrays: both sides take the checksum of
one piece while the next ones are being sent. The step and the checksum come last.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np

from optax_dist.coordinator.aggregation.layout import ALIGNED_BYTES
from optax_dist.coordinator.aggregation.reduce_scatter_gather import (
  Background,
  transfer_id,
)
from optax_dist.coordinator.aggregation.scattered import Scattered
from optax_dist.coordinator.protocol import inputs, messages
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

# The fewest bytes of a piece, and the most pieces of a state.
_LEAST, _PIECES = 16 << 20, 256
_END = 16  # Bytes of the step and the checksum.


class _Checksum:
  """The checksum of a state's pieces, in order, and of its step.

  Example:
    >>> checksum = _Checksum()
    >>> checksum.add([b"123", b"456"])
    >>> checksum.add([b"789"])
    >>> hex(checksum.value)
    '0xcbf43926'
  """

  def __init__(self) -> None:
    self.value = 0

  def add(self, parts: Sequence[memoryview | bytes]) -> None:
    for part in parts:
      self.value = zlib.crc32(part, self.value)

  def end(self, step: int) -> bytes:
    """The bytes that follow the pieces: the step and the checksum."""
    self.add([step.to_bytes(8, "little")])
    return np.array([step, self.value], np.int64).tobytes()


@dataclasses.dataclass
class _Fetch:
  """A state that is being fetched.

  Attributes:
    transfer: the core's id of this transfer.
    source: the peer that serves it.
    raw: memory for the state.
    end: memory for its step and its checksum.
    moved: when the last of its arrays arrived.
    missing: the ids of the arrays that have not arrived.
    checksum: the checksum of the arrays that have arrived.
  """

  transfer: int
  source: str
  raw: np.ndarray
  end: np.ndarray
  moved: float
  missing: set[int] = dataclasses.field(default_factory=set)
  checksum: _Checksum = dataclasses.field(default_factory=_Checksum)


class Snapshots:
  """Serves and fetches states; the thread that owns the transport calls it."""

  def __init__(
    self,
    transport: sockets.Transport,
    nbytes: int,
    background: Background,
    timeout: float,
    answer: Callable[[inputs.Input], None],
  ):
    """Creates it, without transfers.

    Args:
      transport: connections to the others.
      nbytes: size of a state.
      background: runs slow work, in order.
      timeout: seconds without a byte after which fetching fails.
      answer: takes inputs for the protocol core.
    """
    self._transport = transport
    self._nbytes = nbytes
    size = max(_LEAST, -(-nbytes // _PIECES))
    cuts = [*range(0, nbytes, size), nbytes]
    self._pieces = list(itertools.pairwise(cuts))
    self._background = background
    self._timeout = timeout
    self._answer = answer
    self._fetch: _Fetch | None = None

  def serve(
    self,
    message: messages.Serve,
    step: int,
    parts: Callable[[], Sequence[memoryview]],
  ) -> None:
    """Serves a state.

    Args:
      message: the request, which names the receiver.
      step: the step of the state.
      parts: returns the state's bytes, which must not change; runs in the background.
    """
    made: list[Scattered] = []
    checksum = _Checksum()
    pieces = lambda number: made[0].parts(*self._pieces[number])
    numbers = _transfers(message.transfer, len(self._pieces))
    send = lambda number, data: self._transport.send_array(
      message.to, numbers[number], data
    )

    def begin() -> None:
      self._transport.connect(message.to, message.address)
      for number in range(len(self._pieces)):
        send(number, pieces(number))
      sum_up(0)

    def sum_up(number: int) -> None:
      if number == len(self._pieces):
        send(number, checksum.end(step))
        return
      # Piece by piece, so that the background thread can compute updates in between.
      self._background(
        lambda: checksum.add(pieces(number)), lambda: sum_up(number + 1)
      )

    self._background(lambda: made.append(Scattered(parts())), begin)

  def fetch(self, message: messages.Fetch) -> None:
    """Starts to fetch a state; cancels any other fetch."""
    self._drop_fetch()
    fetch = self._fetch = _Fetch(
      message.transfer,
      message.source,
      _aligned(self._nbytes),
      _aligned(_END),
      self._transport.now(),
    )
    self._transport.connect(message.source, message.address)
    arrays = [fetch.raw[low:high] for low, high in self._pieces]
    arrays.append(fetch.end)
    numbers = _transfers(message.transfer, len(self._pieces))
    for number, array in zip(numbers, arrays, strict=True):
      fetch.missing.add(number)
      self._transport.expect(message.source, number, array.data)

  def take(self, transfer: int) -> np.ndarray:
    """The bytes of a fetched state, once; the state may keep the memory."""
    fetch, self._fetch = self._fetch, None
    assert fetch is not None
    assert fetch.transfer == transfer
    assert not fetch.missing
    return fetch.raw

  def handle(self, event: transports.Event) -> None:
    """Handles an event of the transport, if it is of a state."""
    fetch = self._fetch
    match event:
      case transports.ArrayReceived(peer, number, data):
        if _is_of(fetch, peer, number):
          self._received(fetch, number, data)
      case transports.ArrayFailed(peer, number, False, reason):
        if _is_of(fetch, peer, number):
          self._fail(fetch, reason)

  def _received(self, fetch: _Fetch, number: int, data: memoryview) -> None:
    fetch.missing.remove(number)
    fetch.moved = self._transport.now()
    if fetch.missing:
      self._background(lambda: fetch.checksum.add([data]), None)
    else:  # The step and the checksum, which come last.
      self._background(lambda: None, lambda: self._check(fetch))

  def _check(self, fetch: _Fetch) -> None:
    """Accepts a state if its bytes are those that were served."""
    if self._fetch is not fetch:
      return
    step = int(fetch.end.view(np.int64)[0])
    if fetch.checksum.end(step) != fetch.end.tobytes():
      reason = "it has changed on the way: its checksum is another one"
      self._fail(fetch, reason)
      return
    self._answer(inputs.SnapshotFetched(fetch.transfer, step))

  def _fail(self, fetch: _Fetch, reason: str) -> None:
    self._drop_fetch()
    self._answer(inputs.SnapshotFailed(fetch.transfer, reason))

  def _drop_fetch(self) -> None:
    fetch, self._fetch = self._fetch, None
    if fetch is not None:
      for number in fetch.missing:
        self._transport.cancel(fetch.source, number)

  def check(self) -> None:
    """Gives up a fetch without progress; to be called often."""
    fetch = self._fetch
    if fetch is None or not fetch.missing:
      return
    idle = self._transport.now() - fetch.moved
    for number in fetch.missing:
      idle = min(idle, self._transport.idle(fetch.source, number) or 0.0)
    if idle > self._timeout:
      trouble = self._transport.trouble(fetch.source)
      reason = f"no byte of it came for {idle:.1f} s"
      self._fail(fetch, f"{reason}: {trouble}" if trouble else reason)


def _transfers(transfer: int, pieces: int) -> list[int]:
  """The ids of the arrays of a state: its pieces, and its end."""
  return [
    transfer_id("snapshot", transfer, number) for number in range(pieces + 1)
  ]


def _is_of(fetch: _Fetch | None, peer: str, number: int) -> TypeGuard[_Fetch]:
  """Whether an array is one that is missing."""
  return fetch is not None and fetch.source == peer and number in fetch.missing


def _aligned(nbytes: int) -> np.ndarray:
  """Memory that JAX takes as it is."""
  memory = np.empty(nbytes + ALIGNED_BYTES, np.uint8)
  start = -memory.ctypes.data % ALIGNED_BYTES
  return memory[start : start + nbytes]
