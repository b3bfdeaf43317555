"""An exchange that takes the best way to each peer.

Processes of one host share memory, others use a `transfer_exchange`. Who offers
and who fetches decide alike, as an address says which ways lead to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from optax_dist.coordinator import (
  buffer_pool,
  engine,
  futex,
  process_watch,
  shared_memory,
  transfer_exchange,
)

_TICKETS = 2**62


@dataclasses.dataclass(frozen=True)
class Address:
  """The ways that lead to an exchange.

  Attributes:
    place: where its table is, for processes of its host.
    transfer: of its transfer server, ``host:port``.
  """

  place: shared_memory.Place | None
  transfer: str | None

  def dump(self) -> str:
    """As text."""
    place = self.place.dump() if self.place else None
    return json.dumps([place, self.transfer], separators=(",", ":"))

  @classmethod
  def load(cls, text: str) -> Address:
    """From text; raises a `ValueError` if it is none of `dump`."""
    return _loaded(text)


@functools.lru_cache(maxsize=1024)
def _loaded(text: str) -> Address:
  try:
    place, transfer = json.loads(text)
  except (TypeError, ValueError):
    raise ValueError(f"Not an exchange's address: {text!r}.") from None
  if not isinstance(transfer, str | None):
    raise ValueError(f"Not an exchange's address: {text!r}.")
  return Address(
    None if place is None else shared_memory.Place.load(place), transfer
  )


class HostExchange:
  """Shared memory on one host, transfers between hosts; see `engine.Exchange`.

  Where memory is shared it also takes notes; see `engine.Notes`.

  Attributes:
    address: text of an `Address`.
    bytes_in: payload bytes fetched so far.
    bytes_out: payload bytes that were offered, once for each reader.
  """

  def __init__(
    self,
    *,
    share_memory: bool,
    transfer: transfer_exchange.TransferServer | None,
  ):
    """Makes an exchange.

    Args:
      share_memory: whether to use memory that processes of this host share.
      transfer: what other peers are reached with.
    """
    self._pool = buffer_pool.BufferPool(shared=share_memory)
    self._table = shared_memory.OfferTable(self._pool) if share_memory else None
    self._reader = shared_memory.Reader()
    self._watch = process_watch.ProcessWatch()
    address = Address(
      self._table.place if self._table else None,
      transfer.address if transfer else None,
    )
    self.address = address.dump()
    self._transfer = (
      transfer_exchange.TransferExchange(transfer, self._pool, self.address)
      if transfer
      else None
    )
    self.bytes_in = 0
    self.bytes_out = 0
    self._lock = threading.Lock()
    self._fetching = 0
    self._closed = False

  def buffer(self, nbytes: int) -> np.ndarray:
    self._check_open()
    return self._pool.take(nbytes)

  def recycle(self, buffer: np.ndarray) -> None:
    if not self._closed:
      self._pool.recycle(buffer)

  def offer(
    self, ticket: int, array: np.ndarray, readers: Sequence[str]
  ) -> None:
    self._check_open()
    _check_ticket(ticket)
    near = [r for r in readers if self._place(r)]
    far = [r for r in readers if not self._place(r)]
    if near:
      assert self._table is not None
      self._table.offer(ticket, array)
    if far:
      transfer, _ = self._way(far[0])
      transfer.offer(ticket, array, far)
    with self._lock:
      self.bytes_out += array.size * len(readers)

  def fetch(
    self,
    peer: str,
    ticket: int,
    nbytes: int,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> engine.Fetched:
    self._check_open()
    _check_ticket(ticket)
    place = self._place(peer)
    with self._counted():
      if place:
        fetched = self._reader.fetch(place, ticket, nbytes, timeout, cancelled)
      else:
        transfer, there = self._way(peer)
        fetched = transfer.fetch(
          peer, there, ticket, nbytes, timeout, cancelled
        )
    with self._lock:
      self.bytes_in += nbytes
    return fetched

  def is_near(self, peer: str) -> bool:
    return self._place(peer) is not None

  def reaches(self, peer: str) -> bool:
    # Who can't be woken would have to look for notes all the time.
    return futex.is_available() and self.is_near(peer)

  def leave(self, ticket: int, message: bytes) -> bool:
    self._check_open()
    assert self._table is not None
    return self._table.note(ticket, message)

  def find(
    self,
    peer: str,
    tickets: Sequence[int],
    timeout: float = 0.0,
    cancelled: Callable[[], bool] | None = None,
  ) -> tuple[int, bytes] | None:
    self._check_open()
    place = self._place(peer)
    assert place is not None
    return self._reader.note(place, tickets, timeout, cancelled)

  def watch(self, peer: str, lost: Callable[[], None]) -> Callable[[], None]:
    self._check_open()
    place = self._place(peer)
    if place:
      return self._watch.add(place.process, lost)
    transfer, there = self._way(peer)
    return transfer.watch(peer, there, lost)

  def pending(self) -> int:
    count = self._fetching + self._watch.count()
    if self._table:
      count += self._table.count()
    if self._transfer:
      count += self._transfer.pending()
    return count

  def close(self) -> None:
    with self._lock:
      if self._closed:
        return
      self._closed = True
    self._reader.close()
    self._watch.close()
    if self._transfer:
      self._transfer.close()
    if self._table:
      self._table.close()
    self._pool.close()

  def _place(self, peer: str) -> shared_memory.Place | None:
    """Where the peer's table is, if memory is shared with it."""
    place = Address.load(peer).place
    if self._table and place and place.host == self._table.place.host:
      return place
    return None

  def _way(self, peer: str) -> tuple[transfer_exchange.TransferExchange, str]:
    there = Address.load(peer).transfer
    if self._transfer is None or there is None:
      who = "This process" if self._transfer is None else "The peer"
      raise engine.PeerLost(
        f"{who} shares no memory with the other one, and has no transfer"
        f" server. Peer: {peer}; this process: {self.address}."
      )
    return self._transfer, there

  @contextlib.contextmanager
  def _counted(self) -> Iterator[None]:
    with self._lock:
      self._fetching += 1
    try:
      yield
    finally:
      with self._lock:
        self._fetching -= 1

  def _check_open(self) -> None:
    if self._closed:
      raise engine.PeerLost("The exchange has been closed.")


def _check_ticket(ticket: int) -> None:
  if not 0 <= ticket < _TICKETS:
    raise ValueError(f"A ticket is from 0 to 2**62 - 1; got {ticket}.")
