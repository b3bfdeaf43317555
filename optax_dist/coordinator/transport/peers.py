"""The common part of all transports: one session per peer, and their events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from optax_dist.coordinator.transport import (
  clock,
  interface,
  session,
  shared_memory,
)


class Peers:
  """The part of `interface.Transport` that does not depend on connections.

  Attributes:
    name: name of this process.
  """

  def __init__(
    self,
    name: str,
    limits: interface.Limits | None,
    time_source: Callable[[], float] = time.monotonic,
  ):
    self.name = name
    self._limits = limits or interface.Limits()
    self._clock = clock.AwakeClock(self._limits.heartbeat, time_source)
    self._closed = False
    self._events: list[interface.Event] = []
    self._pool = shared_memory.Pool(self._region_dropped)
    # For peers that are connected or connecting.
    self._sessions: dict[str, session.Session] = {}
    self._lent: dict[tuple[str, int], session.Session] = {}

  # Implemented by each kind of transport.

  def _to_write(self, peer: str) -> None:
    """Called when there may be data to write to a peer."""
    raise NotImplementedError

  def _is_connected(self, peer: str) -> bool:
    """Whether the peer is still connected."""
    raise NotImplementedError

  def _disconnected(self, peer: str) -> None:
    """Closes the peer's connection; memory that it lent is its own again."""
    raise NotImplementedError

  # Common to all transports.

  def now(self) -> float:
    return self._clock.now()

  def send(self, peer: str, payload: Sequence[interface.Buffer]) -> bool:
    self._check_open()
    found = self._sessions.get(peer)
    if found is None:
      return False
    found.send(payload)
    if found.backlog > self._limits.max_queued:
      most = f"{self._limits.max_queued:,}"
      self._lose(peer, "overflow", f"more than {most} bytes wait for it")
      return False
    self._to_write(peer)
    return True

  def trouble(self, peer: str) -> str:
    return ""

  def allocate(self, nbytes: int) -> memoryview:
    return self._pool.allocate(nbytes)

  def free(self, memory: memoryview) -> None:
    self._pool.free(memory)

  def send_array(
    self,
    peer: str,
    transfer: int,
    data: interface.Buffer | Sequence[interface.Buffer],
    filled: int | None = None,
  ) -> None:
    found = self._session(peer, transfer)
    if found is None:
      self._not_connected(peer, transfer, True)
      return
    found.send_array(transfer, data, filled)
    self._to_write(peer)

  def fill(self, peer: str, transfer: int, filled: int) -> None:
    found = self._session(peer, transfer)
    if found is not None:
      found.fill(transfer, filled)
      self._to_write(peer)

  def expect(
    self,
    peer: str,
    transfer: int,
    nbytes: int,
    into: interface.Buffer | None = None,
    in_parts: bool = False,
  ) -> None:
    found = self._session(peer, transfer)
    if found is None:
      self._not_connected(peer, transfer, False)
      return
    found.expect(transfer, nbytes, into, in_parts)
    self._to_write(peer)

  def progress(self, peer: str, transfer: int) -> interface.Progress | None:
    found = self._sessions.get(peer)
    return found.progress(transfer) if found else None

  def release(self, peer: str, transfer: int) -> bool:
    lender = self._lent.pop((peer, transfer), None)
    if lender is None:
      return True
    if self._sessions.get(peer) is not lender or not self._is_connected(peer):
      return False
    lender.release(transfer)
    self._to_write(peer)
    return True

  def cancel(self, peer: str, transfer: int) -> None:
    found = self._session(peer, transfer)
    if found is not None:
      found.cancel(transfer)
      self._to_write(peer)

  def _session(self, peer: str, transfer: int) -> session.Session | None:
    self._check_open()
    if not 0 <= transfer < 2**63:
      raise ValueError(f"transfer must be from 0 to 2**63 - 1, got {transfer}.")
    return self._sessions.get(peer)

  def _not_connected(self, peer: str, transfer: int, sending: bool) -> None:
    reason = f"{peer!r} is not connected"
    self._events.append(interface.ArrayFailed(peer, transfer, sending, reason))

  def _emit(self, event: interface.Event) -> None:
    if isinstance(event, interface.ArrayPart) and self._events:
      last = self._events[-1]
      if isinstance(last, interface.ArrayPart) and last.data is event.data:
        self._events.pop()  # More of the same array.
    self._events.append(event)
    if isinstance(event, interface.ArrayReceived) and event.data.readonly:
      lender = self._sessions[event.peer]
      self._lent[event.peer, event.transfer] = lender

  def _lose(self, peer: str, how: interface.How, reason: str) -> None:
    # Before lent memory is reused, so that its readers can tell.
    self._disconnected(peer)
    self._sessions.pop(peer).close(f"{peer!r} is lost: {reason}")
    self._events.append(interface.PeerLost(peer, how, reason))

  def _forget(self, peer: str) -> session.Session:
    """Drops a peer, and its events that were not polled yet."""
    for event in self._events:
      if event.peer == peer and isinstance(event, interface.ArrayReceived):
        self._lent.pop((peer, event.transfer), None)
    self._events = [e for e in self._events if e.peer != peer]
    return self._sessions.pop(peer)

  def _region_dropped(self, number: int) -> None:
    for found in self._sessions.values():
      found.drop_region(number)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError("This transport is closed, or its process has forked.")
