"""Complete states for a replica that has joined, or fell too far behind."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from optax_dist.coordinator.aggregation.reduce_scatter_gather import (
  Background,
  transfer_id,
)
from optax_dist.coordinator.protocol import effects, inputs
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

# The step comes first, then a digest; the rest is aligned like the layout.
HEADER = 64
_DIGEST = 16

Answer = inputs.SnapshotFetched | inputs.SnapshotFailed


@dataclasses.dataclass
class _Served:
  """A state being served.

  Attributes:
    key: peer and transfer id.
    memory: its bytes, which the peer may read.
    writing: whether another thread still writes them.
    dropped: whether it is no longer wanted.
  """

  key: tuple[str, int]
  memory: memoryview
  writing: bool = True
  dropped: bool = False


class Snapshots:
  """Serves and fetches states; the thread that owns the transport calls it.

  Attributes:
    answers: inputs for the protocol core.
    bytes_in: bytes of states received.
    bytes_out: bytes of states sent.
  """

  def __init__(
    self,
    transport: sockets.Transport,
    nbytes: int,
    background: Background,
    timeout: float,
  ):
    """Creates it, without transfers.

    Args:
      transport: connections to the others.
      nbytes: size of a state.
      background: runs slow work.
      timeout: seconds without a byte after which fetching fails.
    """
    self.answers: list[Answer] = []
    self.bytes_in = self.bytes_out = 0
    self._transport = transport
    self._nbytes = HEADER + nbytes
    self._background = background
    self._timeout = timeout
    self._served: dict[int, _Served] = {}
    self._sending: dict[tuple[str, int], int] = {}
    self._fetching: tuple[int, str, int] | None = None
    # The fetched state whose digest is being computed.
    self._checking: int | None = None
    self._fetched: dict[int, np.ndarray] = {}

  def serve(
    self, effect: effects.ServeSnapshot, write: Callable[[np.ndarray], None]
  ) -> None:
    """Serves a state.

    Args:
      effect: the effect to execute.
      write: writes the state's bytes; runs in the background.
    """
    self.drop(effect.transfer)
    memory = self._transport.allocate(self._nbytes)
    number = transfer_id("snapshot", effect.transfer)
    served = _Served((effect.to, number), memory)
    self._served[effect.transfer] = served
    raw = np.frombuffer(memory, np.uint8)
    raw[:HEADER] = 0
    raw[:8].view(np.int64)[0] = effect.step

    def done(error: BaseException | None) -> None:
      served.writing = False
      if error is not None or served.dropped:
        self._served.pop(effect.transfer, None)
        self._transport.free(memory)
        if error is not None:
          raise error
        return
      self._sending[served.key] = effect.transfer
      self._connect(effect.to, effect.address)
      self._transport.send_array(*served.key, memory)

    def work() -> None:
      write(raw[HEADER:])
      raw[8 : 8 + _DIGEST] = _digest(raw)

    self._background(work, done)

  def fetch(self, effect: effects.FetchSnapshot) -> None:
    """Starts to fetch a state; cancels any other fetch."""
    if self._fetching is not None:
      self.drop(self._fetching[0])
    self._checking = None
    self._fetched.clear()
    number = transfer_id("snapshot", effect.transfer)
    self._fetching = (effect.transfer, effect.source, number)
    self._connect(effect.source, effect.address)
    # Into separate memory, which the state may keep using.
    memory = memoryview(bytearray(self._nbytes))
    self._transport.expect(effect.source, number, self._nbytes, memory)

  def take(self, transfer: int) -> np.ndarray:
    """The bytes of a fetched state."""
    return self._fetched[transfer][HEADER:]

  def drop(self, transfer: int) -> None:
    """Stops serving or fetching; no effect if it has ended."""
    if self._fetching is not None and self._fetching[0] == transfer:
      self._transport.cancel(*self._fetching[1:])
      self._fetching = None
    if self._checking == transfer:
      self._checking = None
    self._fetched.pop(transfer, None)
    served = self._served.get(transfer)
    if served is not None:
      served.dropped = True
      if not served.writing:
        self._transport.cancel(*served.key)
        self._end(transfer)

  def handle(self, event: transports.Event) -> bool:
    """Handles an event of the transport; returns whether it was its own."""
    match event:
      case transports.ArrayReceived(peer, number, data):
        if self._fetching is None or self._fetching[1:] != (peer, number):
          return False
        transfer, self._fetching = self._fetching[0], None
        self.bytes_in += len(data)
        self._check_digest(transfer, np.frombuffer(data, np.uint8))
      case transports.ArraySent(peer, number):
        if (peer, number) not in self._sending:
          return False
        self.bytes_out += self._nbytes
        self._end(self._sending[peer, number])
      case transports.ArrayFailed(peer, number, True, _):
        if (peer, number) not in self._sending:
          return False
        self._end(self._sending[peer, number])
      case transports.ArrayFailed(peer, number, False, reason):
        if self._fetching is None or self._fetching[1:] != (peer, number):
          return False
        self._fail(reason)
      case _:
        return False
    return True

  def _check_digest(self, transfer: int, raw: np.ndarray) -> None:
    """Accepts a state if its bytes are those that were served."""
    self._checking = transfer
    found: list[np.ndarray] = []

    def done(error: BaseException | None) -> None:
      if self._checking != transfer:
        return
      self._checking = None
      if error is not None:
        raise error
      if not np.array_equal(found[0], raw[8 : 8 + _DIGEST]):
        reason = "it has changed on the way: its digest is another one"
        self.answers.append(inputs.SnapshotFailed(transfer, reason))
        return
      self._fetched[transfer] = raw
      step = int(raw[:8].view(np.int64)[0])
      self.answers.append(inputs.SnapshotFetched(transfer, step))

    self._background(lambda: found.append(_digest(raw)), done)

  def deadline(self) -> float | None:
    """Seconds until `check` is due; None if it isn't needed."""
    return None if self._fetching is None else self._timeout / 8

  def check(self) -> None:
    """Gives up a fetch without progress."""
    if self._fetching is None:
      return
    _, peer, number = self._fetching
    progress = self._transport.progress(peer, number)
    if progress is not None and progress.idle > self._timeout:
      self._transport.cancel(peer, number)
      self._fail(f"no byte of it came for {progress.idle:.1f} s")

  def pending(self) -> int:
    """The number of transfers in progress."""
    fetching = self._fetching is not None or self._checking is not None
    return len(self._served) + fetching

  def close(self) -> None:
    """Stops all transfers."""
    for transfer in list(self._served):
      self.drop(transfer)
    if self._fetching is not None:
      self.drop(self._fetching[0])
    self._checking = None

  def _connect(self, peer: str, address: str) -> None:
    # Without a connection, the transfer fails, and nothing else.
    with contextlib.suppress(ValueError):  # The peer advertises no address.
      self._transport.connect(peer, address)

  def _fail(self, reason: str) -> None:
    assert self._fetching is not None
    transfer, self._fetching = self._fetching[0], None
    self.answers.append(inputs.SnapshotFailed(transfer, reason))

  def _end(self, transfer: int) -> None:
    served = self._served.pop(transfer)
    del self._sending[served.key]
    self._transport.free(served.memory)


def _digest(raw: np.ndarray) -> np.ndarray:
  """The digest of a step and its state."""
  found = hashlib.blake2b(raw[:8].data, digest_size=_DIGEST)
  found.update(raw[HEADER:].data)
  return np.frombuffer(found.digest(), np.uint8)
