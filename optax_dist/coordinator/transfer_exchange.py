"""Offers to processes of other hosts, by a transfer server.

A server moves an array once, to whoever pulls its number. Large arrays go in
pieces, which it moves at the same time. It knows no deadlines, so they are kept
here; and a peer that ends is noticed by a pull of what is never offered.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from optax_dist.coordinator import buffer_pool, engine, polling

_logger = logging.getLogger(__name__)

# With several pieces under way all transports are busy.
PIECE = 4 << 20

_WATCH_SECONDS = 0.01

# What a reader has not pulled so long after it was recycled, it won't.
_REVOKE_SECONDS = 5.0


class TransferServer(Protocol):
  """What moves arrays; `jax_runtime` has one.

  Attributes:
    address: where peers reach it, ``host:port``.
  """

  address: str

  def offer(self, uuid: int, memory: np.ndarray) -> None:
    """Lets one reader pull the memory once; keeps it alive until then."""
    ...

  def connect(self, address: str) -> Any:
    """Returns a connection; it may say nothing about a peer that is gone."""
    ...

  def pull(self, connection: Any, uuid: int, nbytes: int) -> Pull:
    """Starts to pull."""
    ...


class Pull(Protocol):
  """What is being pulled."""

  def is_ready(self) -> bool:
    """Whether `result` returns at once."""
    ...

  def result(self) -> np.ndarray:
    """The bytes; raises a `ConnectionError` if the peer is gone."""
    ...


@dataclasses.dataclass
class _Fetch:
  """The pulls of one ticket; a fetch that is given up can be taken up again."""

  connection: Any
  pulls: list[Pull]


@dataclasses.dataclass
class _Watch:
  pull: Pull
  lost: list[Callable[[], None]]


@dataclasses.dataclass
class _Offer:
  """A piece that is offered to one reader, until it is pulled."""

  uuid: int
  nbytes: int
  buffer: buffer_pool.Buffer
  recycled: float | None = None  # When.
  revoked: bool = False


class _Lease:
  """Memory that comes back when nobody refers to it any more."""

  def __init__(self, memory: np.ndarray):
    self.__array_interface__ = memory.__array_interface__


class TransferExchange:
  """Offers to, fetches from and watches peers of other hosts."""

  def __init__(
    self, server: TransferServer, pool: buffer_pool.BufferPool, name: str
  ):
    """Makes an exchange.

    Args:
      server: what moves the arrays.
      pool: where what is offered lies.
      name: the whole address of this exchange, which readers go by.
    """
    self._server = server
    self._pool = pool
    self._name = name
    self._lock = threading.Lock()
    self._connections: dict[str, Any] = {}
    self._offers: dict[int, _Offer] = {}  # By identity of its view.
    self._pulled: collections.deque[int] = collections.deque()
    self._given_up: dict[tuple[str, int, int], _Fetch] = {}
    self._watches: dict[str, _Watch] = {}
    self._watching = False
    self._landing: dict[int, list[np.ndarray]] = {}  # Free memory, by size.
    self._landed: collections.deque[np.ndarray] = collections.deque()
    self._closed = False

  # --- Offers ---

  def offer(
    self, ticket: int, array: np.ndarray, readers: Sequence[str]
  ) -> None:
    """See `engine.Exchange.offer`."""
    self._tidy()
    buffer, offset = self._pool.find(array)
    at = offset - buffer.offset
    for reader in readers:
      for i, (start, size) in enumerate(_pieces(array.size)):
        # A view for each, as its end tells that it has been pulled.
        view = buffer.memory[at + start : at + start + size]
        offer = _Offer(_uuid(ticket, reader, i), size, buffer)
        token = id(offer)
        with self._lock:
          self._offers[token] = offer
        self._pool.hold(buffer)
        buffer.on_recycle.append(functools.partial(_stamp, offer))
        # Runs anywhere, also where a lock is held: leave the rest to `_tidy`.
        end = weakref.finalize(view, self._pulled.append, token)
        end.atexit = False
        self._server.offer(offer.uuid, view)

  def _tidy(self) -> None:
    """Releases what has been pulled; takes back what nobody pulls."""
    late: list[_Offer] = []
    with self._lock:
      while self._pulled:
        offer = self._offers.pop(self._pulled.popleft(), None)
        if offer is not None:
          self._pool.release(offer.buffer)
      now = time.monotonic()
      for offer in self._offers.values():
        if (
          offer.recycled is not None
          and not offer.revoked
          and now - offer.recycled > _REVOKE_SECONDS
        ):
          offer.revoked = True
          late.append(offer)
    for offer in late:
      # The server can't be told to forget it, but gives it to anyone.
      connection = self._connection(self._server.address, 1.0)
      self._server.pull(connection, offer.uuid, offer.nbytes)

  # --- Fetches ---

  def fetch(
    self,
    peer: str,
    there: str,
    ticket: int,
    nbytes: int,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> engine.Fetched:
    """See `engine.Exchange.fetch`.

    Args:
      peer: the whole address of the peer.
      there: the address of its transfer server.
      ticket: the number.
      nbytes: how many bytes are expected.
      timeout: seconds.
      cancelled: ends the wait.
    """
    wait = polling.Polling(timeout, cancelled)
    key = (peer, ticket, nbytes)
    with self._lock:
      fetch = self._given_up.pop(key, None)
    if fetch is None:
      connection = self._connection(there, timeout)
      fetch = _Fetch(
        connection,
        [
          self._server.pull(connection, _uuid(ticket, self._name, i), size)
          for i, (_, size) in enumerate(_pieces(nbytes))
        ],
      )
    try:
      return self._land(fetch, nbytes, wait)
    except TimeoutError as error:
      with self._lock:
        self._given_up[key] = fetch
      raise engine.EngineTimeout(
        f"{there} offered nothing under ticket {ticket}, or did not move it:"
        f" {error}."
      ) from None
    except ConnectionError as error:
      with self._lock:
        if self._connections.get(there) is fetch.connection:
          del self._connections[there]
      raise engine.PeerLost(f"{there} is lost: {error}.") from error

  def _land(
    self, fetch: _Fetch, nbytes: int, wait: polling.Polling
  ) -> engine.Fetched:
    pieces = _pieces(nbytes)
    if len(pieces) == 1:
      self._wait(fetch.pulls[0], wait)
      whole = fetch.pulls[0].result()[:nbytes]
    else:
      whole = self._lease(nbytes)
      for (start, size), pull in zip(pieces, fetch.pulls, strict=True):
        self._wait(pull, wait)
        whole[start : start + size] = pull.result()
    return engine.Fetched(whole, _stays)

  def _wait(self, pull: Pull, wait: polling.Polling) -> None:
    while not pull.is_ready():
      if self._closed:
        raise ConnectionError("this exchange has been closed")
      wait.pause()

  def _lease(self, nbytes: int) -> np.ndarray:
    """Memory that returns by itself: fresh pages cost more than a copy."""
    with self._lock:
      while self._landed:
        memory = self._landed.popleft()
        self._landing.setdefault(memory.size, []).append(memory)
      free = self._landing.get(nbytes)
      memory = free.pop() if free else np.empty(nbytes, np.uint8)
    lease = _Lease(memory)
    end = weakref.finalize(lease, self._landed.append, memory)
    end.atexit = False
    return np.asarray(lease)

  def _connection(self, there: str, timeout: float) -> Any:
    with self._lock:
      connection = self._connections.get(there)
    if connection is None:
      _check_reachable(there, timeout)
      connection = self._server.connect(there)
      with self._lock:
        connection = self._connections.setdefault(there, connection)
    return connection

  # --- Watches ---

  def watch(
    self, peer: str, there: str, lost: Callable[[], None]
  ) -> Callable[[], None]:
    """See `engine.Exchange.watch`."""
    try:
      connection = self._connection(there, 1.0)
    except engine.PeerLost:
      threading.Thread(target=lost, daemon=True).start()
      return lambda: None
    with self._lock:
      if there not in self._watches:
        # Never offered, so it ends with the peer.
        uuid = _uuid(-1, f"{self._name} {peer}", 0)
        pull = self._server.pull(connection, uuid, 1)
        self._watches[there] = _Watch(pull, [])
      watch = self._watches[there]
      watch.lost.append(lost)
      if not self._watching:
        self._watching = True
        threading.Thread(
          target=self._run, name="transfer-watch", daemon=True
        ).start()

    def forget() -> None:
      with self._lock, contextlib.suppress(ValueError):
        watch.lost.remove(lost)

    return forget

  def _run(self) -> None:
    while True:
      with self._lock:
        if self._closed or not self._watches:
          self._watching = False
          return
        ended = [t for t, w in self._watches.items() if w.pull.is_ready()]
        gone = [self._watches.pop(there) for there in ended]
        for there in ended:
          self._connections.pop(there, None)
        calls = [lost for watch in gone for lost in watch.lost]
        for watch in gone:
          watch.lost.clear()
      for lost in calls:
        try:
          lost()
        except Exception:
          _logger.exception("What was to be called as a peer ended failed.")
      time.sleep(_WATCH_SECONDS)

  # --- Both ---

  def pending(self) -> int:
    """Offers not yet pulled, fetches given up, and watches."""
    self._tidy()
    with self._lock:
      self._given_up = {
        key: fetch
        for key, fetch in self._given_up.items()
        if not all(pull.is_ready() for pull in fetch.pulls)
      }
      watches = sum(len(watch.lost) for watch in self._watches.values())
      return len(self._offers) + len(self._given_up) + watches

  def close(self) -> None:
    """Ends all waits and watches."""
    with self._lock:
      self._closed = True
      self._watches.clear()
      self._given_up.clear()
      self._landing.clear()


def _pieces(nbytes: int) -> list[tuple[int, int]]:
  """Start and size of each piece; one byte stands for nothing."""
  if nbytes <= PIECE:
    return [(0, max(1, nbytes))]
  return [(s, min(PIECE, nbytes - s)) for s in range(0, nbytes, PIECE)]


def _uuid(ticket: int, reader: str, piece: int) -> int:
  """The number of a piece: each is pulled once, by one reader."""
  text = f"{ticket} {piece} {reader}".encode()
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, "little") >> 2


def _stamp(offer: _Offer) -> None:
  offer.recycled = time.monotonic()


def _stays() -> None:
  """What was moved can't be overwritten by the peer."""


def _check_reachable(there: str, timeout: float) -> None:
  host, _, port = there.rpartition(":")
  try:
    socket.create_connection(
      (host.strip("[]"), int(port)), timeout=max(0.05, timeout)
    ).close()
  except (OSError, ValueError) as error:
    raise engine.PeerLost(f"{there} can't be reached: {error}.") from error
