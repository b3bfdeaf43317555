"""What the coordinator needs from the world: a board and an exchange.

Chief and replicas speak to these protocols alone, so they run unchanged as
threads of one process (`embedded`) and as processes on several hosts
(`jax_runtime`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


class EngineTimeout(TimeoutError):
  """A deadline passed before what was waited for was there."""


class PeerLost(ConnectionError):
  """The process at the other end is gone."""


class OfferGone(LookupError):
  """What was offered under the ticket has been overwritten."""


class BoardLost(ConnectionError):
  """The board can't be reached any more: its service or this engine ended."""


class Board(Protocol):
  """Small keyed messages that every replica can read.

  Keys are paths, such as ``log/17``; values are bytes. All methods may be
  called from several threads at once, and raise `BoardLost` once the board is
  closed or unreachable.
  """

  def put(self, key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Stores a value; of several callers without `overwrite` one succeeds.

    Returns:
      False if the key has a value already, and it was left as it is.
    """
    ...

  def get(self, key: str, timeout: float) -> bytes:
    """Waits until the key has a value.

    Raises:
      EngineTimeout: it has none after `timeout` seconds.
    """
    ...

  def try_get(self, key: str) -> bytes | None:
    """The value that the key has now, if any."""
    ...

  def items(self, prefix: str) -> dict[str, bytes]:
    """All keys under ``prefix/``, with their values."""
    ...

  def delete(self, key: str) -> None:
    """Removes the key, and all keys under ``key/``."""
    ...

  def close(self) -> None:
    """Ends every wait of this process with `BoardLost`."""
    ...


@dataclasses.dataclass(frozen=True)
class Fetched:
  """Bytes of a peer.

  Attributes:
    array: uint8, one-dimensional; read-only by convention. It may be the
      peer's own memory: use it, then call `check`.
    check: raises `OfferGone` if the peer has overwritten the memory meanwhile;
      whatever was computed from it is then worthless.
  """

  array: np.ndarray
  check: Callable[[], None]


class Exchange(Protocol):
  """Bytes offered under a ticket, and fetched from whoever offers them.

  Tickets are whole numbers below 2**62 that both sides compute, so a fetch
  may be posted before the offer. All methods may be called from several
  threads at once.

  Attributes:
    address: what peers need to reach this one; text without line breaks.
    bytes_in: payload bytes fetched so far.
    bytes_out: payload bytes that were offered, once for each reader.
  """

  address: str
  bytes_in: int
  bytes_out: int

  def buffer(self, nbytes: int) -> np.ndarray:
    """Memory that can be offered: uint8, aligned to 64 bytes, not cleared."""
    ...

  def recycle(self, buffer: np.ndarray) -> None:
    """Gives a buffer back; its offers may disappear from now on.

    The memory is handed out again at the earliest after two more buffers of
    its size were recycled, and never while a reader could take what comes
    next for what was offered.
    """
    ...

  def offer(
    self, ticket: int, array: np.ndarray, readers: Sequence[str]
  ) -> None:
    """Lets each of the readers (addresses) fetch the array once.

    Args:
      ticket: the number under which it is fetched.
      array: a one-dimensional uint8 view into a buffer of `buffer`; it must
        not change until the buffer is recycled.
      readers: the addresses of those who may fetch it.
    """
    ...

  def fetch(
    self,
    peer: str,
    ticket: int,
    nbytes: int,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> Fetched:
    """Waits for what the peer offers to this exchange under the ticket.

    Args:
      peer: the address of who offers it.
      ticket: the number under which it is offered.
      nbytes: its size.
      timeout: seconds to wait at most.
      cancelled: asked about every 20 ms while waiting; True ends the wait.

    Raises:
      EngineTimeout: nothing was offered and moved within `timeout` seconds, or
        the wait was cancelled.
      PeerLost: the peer's process has ended, or can't be reached.
    """
    ...

  def is_near(self, peer: str) -> bool:
    """Whether a fetch from it can be given up without leaving anything."""
    ...

  def watch(self, peer: str, lost: Callable[[], None]) -> Callable[[], None]:
    """Calls `lost` once, from another thread, when the peer's process ends.

    It is told at once where the system tells (a killed process), and never
    for one that is stopped, or whose host has vanished: deadlines are for
    those.

    Returns:
      A function that ends the watch.
    """
    ...

  def pending(self) -> int:
    """How many offers, fetches and watches still hold memory or a thread."""
    ...

  def close(self) -> None:
    """Ends every wait of this process with `PeerLost`, and frees memory."""
    ...


class Notes(Protocol):
  """Small messages to whom memory is shared with, several times as fast.

  A note stands until some hundreds of others have followed, and is gone with its
  process: what must not be lost has to be on the board as well.
  """

  def reaches(self, peer: str) -> bool:
    """Whether a process and this one read each other's notes, by its address."""
    ...

  def leave(self, ticket: int, message: bytes) -> bool:
    """Lets others read a message; False if it is too large for that.

    Args:
      ticket: a number below 2**62 by which it is found.
      message: what they read.
    """
    ...

  def find(
    self,
    peer: str,
    tickets: Sequence[int],
    timeout: float = 0.0,
    cancelled: Callable[[], bool] | None = None,
  ) -> tuple[int, bytes] | None:
    """What a peer has left, with its ticket; None if there is nothing.

    Args:
      peer: the address of its exchange.
      tickets: the numbers under which it may stand; the first counts most.
      timeout: seconds to wait for it at most.
      cancelled: asked about every 20 ms while waiting; True ends the wait.

    Raises:
      PeerLost: the peer's process has ended, and there is no such note.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Engine:
  """What belongs together.

  Attributes:
    board: small messages.
    exchange: large arrays.
    notes: small messages past the board, where there is such a way.
  """

  board: Board
  exchange: Exchange
  notes: Notes | None = None

  def close(self) -> None:
    """Closes both; waits in other threads end with an error."""
    self.board.close()
    self.exchange.close()
