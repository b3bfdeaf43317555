"""The engine within one process: replicas are threads, and nothing listens.

For trying things out, for notebooks and for tests.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from optax_dist.coordinator import buffer_pool, engine


class World:
  """What the engines of one process share.

  Example:
    >>> world = World()
    >>> one, two = world.connect("one"), world.connect("two")
    >>> one.board.put("a/b", b"1"), two.board.put("a/b", b"2")
    (True, False)
    >>> two.board.get("a/b", timeout=1.0)
    b'1'
  """

  def __init__(self) -> None:
    self.changed = threading.Condition()
    self.values: dict[str, bytes] = {}
    self.offers: dict[tuple[str, int], Offer] = {}
    self.watches: dict[str, list[Callable[[], None]]] = {}
    self.alive: set[str] = set()
    self._names = 0

  def connect(self, name: str) -> engine.Engine:
    """An engine for one replica; its address is made from the name."""
    with self.changed:
      self._names += 1
      address = f"embedded:{name}:{self._names}"
      self.alive.add(address)
    return engine.Engine(EmbeddedBoard(self), EmbeddedExchange(self, address))


class EmbeddedBoard:
  """A board in memory; see `engine.Board`."""

  def __init__(self, world: World):
    self._world = world
    self._closed = False

  def _check(self) -> None:
    if self._closed:
      raise engine.BoardLost("the board was closed")

  def put(self, key: str, value: bytes, *, overwrite: bool = False) -> bool:
    with self._world.changed:
      self._check()
      if key in self._world.values and not overwrite:
        return False
      self._world.values[key] = bytes(value)
      self._world.changed.notify_all()
      return True

  def get(self, key: str, timeout: float) -> bytes:
    with self._world.changed:
      self._world.changed.wait_for(
        lambda: self._closed or key in self._world.values, timeout
      )
      self._check()
      if key not in self._world.values:
        raise engine.EngineTimeout(f"no {key!r} after {timeout:g} s")
      return self._world.values[key]

  def try_get(self, key: str) -> bytes | None:
    with self._world.changed:
      self._check()
      return self._world.values.get(key)

  def items(self, prefix: str) -> dict[str, bytes]:
    with self._world.changed:
      self._check()
      start = prefix.rstrip("/") + "/"
      return {
        k: v for k, v in self._world.values.items() if k.startswith(start)
      }

  def delete(self, key: str) -> None:
    with self._world.changed:
      self._check()
      self._world.values.pop(key, None)
      start = key + "/"
      for found in [k for k in self._world.values if k.startswith(start)]:
        del self._world.values[found]

  def close(self) -> None:
    with self._world.changed:
      self._closed = True
      self._world.changed.notify_all()


@dataclasses.dataclass
class Offer:
  """What stands under a ticket.

  Attributes:
    array: the bytes.
    gone: whether their buffer was given back.
  """

  array: np.ndarray
  gone: bool = False


class EmbeddedExchange:
  """An exchange in memory; see `engine.Exchange`."""

  def __init__(self, world: World, address: str):
    self._world = world
    self.address = address
    self.bytes_in = self.bytes_out = 0
    self._pool = buffer_pool.BufferPool(shared=False)
    self._waits = 0

  def buffer(self, nbytes: int) -> np.ndarray:
    self._check_open()
    return self._pool.take(nbytes)

  def recycle(self, buffer: np.ndarray) -> None:
    if self.address in self._world.alive:
      self._pool.recycle(buffer)

  def offer(
    self, ticket: int, array: np.ndarray, readers: Sequence[str]
  ) -> None:
    self._check_open()
    buffer, _ = self._pool.find(array)
    made, key = Offer(array), (self.address, ticket)

    def erase() -> None:
      with self._world.changed:
        made.gone = True
        if self._world.offers.get(key) is made:
          del self._world.offers[key]

    with self._world.changed:
      self._world.offers[key] = made
      self.bytes_out += array.nbytes * len(readers)
      self._world.changed.notify_all()
    buffer.on_recycle.append(erase)

  def fetch(
    self,
    peer: str,
    ticket: int,
    nbytes: int,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> engine.Fetched:
    world, key = self._world, (peer, ticket)
    end = time.monotonic() + timeout
    with world.changed:
      self._waits += 1
    try:
      while True:
        with world.changed:
          # Slices, for `cancelled` may take the same lock.
          world.changed.wait_for(
            lambda: key in world.offers or not self._both(peer), 0.02
          )
          if not self._both(peer):
            raise engine.PeerLost(f"{peer} is gone")
          if key in world.offers:
            found = world.offers[key]
            break
        if time.monotonic() > end or (cancelled and cancelled()):
          raise engine.EngineTimeout(f"nothing from {peer} in {timeout:g} s")
    finally:
      with world.changed:
        self._waits -= 1
    if found.array.nbytes != nbytes:
      raise engine.PeerLost(
        f"{peer} offers {found.array.nbytes} bytes under ticket {ticket}, not "
        f"{nbytes}"
      )
    with world.changed:
      self.bytes_in += nbytes

    def check() -> None:
      if found.gone:
        raise engine.OfferGone(f"{peer} has overwritten what it offered")

    return engine.Fetched(found.array, check)

  def _check_open(self) -> None:
    if self.address not in self._world.alive:
      raise engine.PeerLost("The exchange has been closed.")

  def _both(self, peer: str) -> bool:
    return peer in self._world.alive and self.address in self._world.alive

  def is_near(self, peer: str) -> bool:
    return True

  def watch(self, peer: str, lost: Callable[[], None]) -> Callable[[], None]:
    with self._world.changed:
      if peer in self._world.alive:
        self._world.watches.setdefault(peer, []).append(lost)
        return lambda: self._unwatch(peer, lost)
    threading.Thread(target=lost, daemon=True).start()
    return lambda: None

  def _unwatch(self, peer: str, lost: Callable[[], None]) -> None:
    with self._world.changed:
      watches = self._world.watches.get(peer, [])
      if lost in watches:
        watches.remove(lost)

  def pending(self) -> int:
    with self._world.changed:
      offers = sum(1 for who, _ in self._world.offers if who == self.address)
      return offers + self._waits

  def close(self) -> None:
    with self._world.changed:
      self._world.alive.discard(self.address)
      for key in [k for k in self._world.offers if k[0] == self.address]:
        del self._world.offers[key]
      told = self._world.watches.pop(self.address, [])
      self._world.changed.notify_all()
    self._pool.close()
    for lost in told:
      threading.Thread(target=lost, daemon=True).start()
