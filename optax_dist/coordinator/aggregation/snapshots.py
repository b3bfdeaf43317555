"""Complete states for a replica that has joined, or fell too far behind."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from optax_dist.coordinator.aggregation.reduce_scatter_gather import (
  Background,
  transfer_id,
)
from optax_dist.coordinator.protocol import inputs, messages
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

# The step comes first, then a digest; the rest is aligned like the layout.
HEADER = 64
_DIGEST = 16


@dataclasses.dataclass
class _Fetch:
  """A state that is being fetched.

  Attributes:
    transfer: the core's id of it.
    key: the peer, and the id of the array.
    raw: its bytes, once they are here.
  """

  transfer: int
  key: tuple[str, int]
  raw: np.ndarray | None = None


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
      background: runs slow work.
      timeout: seconds without a byte after which fetching fails.
      answer: takes inputs for the protocol core.
    """
    self._transport = transport
    self._nbytes = HEADER + nbytes
    self._background = background
    self._timeout = timeout
    self._answer = answer
    self._fetch: _Fetch | None = None

  def serve(
    self,
    message: messages.Serve,
    step: int,
    write: Callable[[np.ndarray], None],
  ) -> None:
    """Serves a state.

    Args:
      message: to whom.
      step: the step of the state.
      write: writes the state's bytes; runs in the background.
    """
    memory = self._transport.allocate(self._nbytes)
    key = message.to, transfer_id("snapshot", message.transfer)
    raw = np.frombuffer(memory, np.uint8)
    raw[:HEADER] = 0
    raw[:8].view(np.int64)[0] = step

    def work() -> None:
      write(raw[HEADER:])
      raw[8 : 8 + _DIGEST] = _digest(raw)

    def done() -> None:
      self._transport.connect(message.to, message.address)
      self._transport.send_array(*key, memory)

    self._background(work, done)

  def fetch(self, message: messages.Fetch) -> None:
    """Starts to fetch a state; cancels any other fetch."""
    self._drop_fetch()
    key = message.source, transfer_id("snapshot", message.transfer)
    self._fetch = _Fetch(message.transfer, key)
    self._transport.connect(message.source, message.address)
    # Into separate memory, which the state may keep using.
    memory = memoryview(bytearray(self._nbytes))
    self._transport.expect(*key, memory)

  def take(self, transfer: int) -> np.ndarray:
    """The bytes of a fetched state, once."""
    fetch, self._fetch = self._fetch, None
    assert fetch is not None
    assert fetch.transfer == transfer
    assert fetch.raw is not None
    return fetch.raw[HEADER:]

  def handle(self, event: transports.Event) -> None:
    """Handles an event of the transport, if it is of a state."""
    fetch = self._fetch
    match event:
      case transports.ArrayReceived(peer, number, data):
        if fetch is not None and fetch.key == (peer, number):
          fetch.raw = np.frombuffer(data, np.uint8)
          self._check_digest(fetch, fetch.raw)
      case transports.ArrayFailed(peer, number, False, reason):
        if fetch is not None and fetch.key == (peer, number):
          self._fail(fetch, reason)

  def _check_digest(self, fetch: _Fetch, raw: np.ndarray) -> None:
    """Accepts a state if its bytes are those that were served."""
    digests: list[np.ndarray] = []

    def done() -> None:
      if self._fetch is not fetch:
        return
      if not np.array_equal(digests[0], raw[8 : 8 + _DIGEST]):
        reason = "it has changed on the way: its digest is another one"
        self._fail(fetch, reason)
        return
      step = int(raw[:8].view(np.int64)[0])
      self._answer(inputs.SnapshotFetched(fetch.transfer, step))

    self._background(lambda: digests.append(_digest(raw)), done)

  def _fail(self, fetch: _Fetch, reason: str) -> None:
    self._fetch = None
    self._answer(inputs.SnapshotFailed(fetch.transfer, reason))

  def _drop_fetch(self) -> None:
    fetch, self._fetch = self._fetch, None
    if fetch is not None and fetch.raw is None:
      self._transport.cancel(*fetch.key)

  def check(self) -> None:
    """Gives up a fetch without progress; to be called often."""
    fetch = self._fetch
    if fetch is None or fetch.raw is not None:
      return
    idle = self._transport.idle(*fetch.key)
    if idle is not None and idle > self._timeout:
      trouble = self._transport.trouble(fetch.key[0])
      self._transport.cancel(*fetch.key)
      reason = f"no byte of it came for {idle:.1f} s"
      self._fail(fetch, f"{reason}: {trouble}" if trouble else reason)


def _digest(raw: np.ndarray) -> np.ndarray:
  """The digest of a step and its state."""
  hashed = hashlib.blake2b(raw[:8].data, digest_size=_DIGEST)
  hashed.update(raw[HEADER:].data)
  return np.frombuffer(hashed.digest(), np.uint8)
