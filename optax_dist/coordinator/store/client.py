"""A client of a store process; it survives broken connections."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface, wire
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

_PAUSES = (0.05, 0.3)  # Shortest and longest pause before reconnecting.


@dataclasses.dataclass
class _Pending:
  request: interface.Request
  number: int  # The caller's number.
  began: float
  timeout: float


class StoreClient(interface.Store):
  """A client of a store process; see `interface.Store`.

  Its connection belongs to the transport that its owner polls; the owner passes
  events to `handle`. Requests without an answer when a connection breaks are
  sent again over the next one, in order, until they time out.
  """

  def __init__(self, transport: sockets.Transport, address: str):
    """Starts to connect.

    Args:
      transport: the owner's, with the name of this process and the job's
        secret.
      address: address of the store, for `transport.connect`.
    """
    self.address = f"tcp://{address}"
    self._transport, self._where = transport, address
    self._events: collections.deque[interface.Event] = collections.deque()
    self._numbers = itertools.count()
    self._pending: dict[int, _Pending] = {}
    self._store = ""
    self._up = self._closed = False
    self._connect_at, self._pause = math.inf, _PAUSES[0]
    self._detail = "not connected yet"
    self._connect()

  def ask(self, request: interface.Request, timeout: float) -> None:
    interface.check(request)
    # Renumbered, since the caller may reuse its number after an `Unknown`.
    number = next(self._numbers)
    numbered = codec.replace(request, request=number)
    self._pending[number] = _Pending(
      numbered, request.request, time.monotonic(), timeout
    )
    if self._up:
      self._send(numbered)

  def handle(self, event: transports.Event) -> bool:
    if event.peer != wire.STORE:
      return False
    match event:
      case transports.PeerLost(_, how, reason):
        self._disconnected(how, reason)
      case transports.Message(_, payload):
        try:
          self._receive(wire.REPLIES.decode(payload))
        except codec.BadMessage as error:
          self._lose(f"it sent what this version can't read: {error}")
    return True

  def deadline(self) -> float | None:
    ends = [p.began + p.timeout for p in self._pending.values()]
    soon = min((self._connect_at, *ends))
    return None if soon == math.inf else max(0.0, soon - time.monotonic())

  def poll(self) -> list[interface.Event]:
    now = time.monotonic()
    if now >= self._connect_at:
      self._connect()
    for number, pending in list(self._pending.items()):
      if now >= pending.began + pending.timeout:
        del self._pending[number]
        reason = (
          f"{interface.describe(pending.request)} at {self.address}: no answer"
          f" in {now - pending.began:.1f} s"
          f" ({self._why()})"
        )
        self._events.append(interface.Unknown(pending.number, reason))
    events = list(self._events)
    self._events.clear()
    return events

  def close(self) -> None:
    if not self._closed:
      self._end()

  def _why(self) -> str:
    """Why there may be no answer."""
    trouble = self._transport.trouble(wire.STORE)
    return f"not connected: {trouble}" if trouble else self._detail

  def _connect(self) -> None:
    self._connect_at = math.inf
    # The store outlives runs, so it has no nonce.
    self._transport.connect(wire.STORE, self._where, b"")

  def _receive(self, reply: wire.Reply) -> None:
    if isinstance(reply, wire.Welcome):
      if self._store not in ("", reply.store):
        self._lose("it was started anew, and what it knew is gone")
        return
      self._store, self._up, self._pause = reply.store, True, _PAUSES[0]
      self._detail = "connected"
      for pending in self._pending.values():
        self._send(pending.request)
      return
    asked = self._pending.pop(reply.request, None)
    if asked is not None:
      answer = codec.replace(reply, request=asked.number)
      self._events.append(answer)

  def _disconnected(self, how: transports.How, reason: str) -> None:
    self._up = False
    self._detail = f"not connected: {reason}"
    if self._closed:
      return
    if how in ("left", "refused", "ended"):
      if not self._store:
        reason = f"what listens there is not this job's store: {reason}"
      self._lose(reason)
    elif how != "replaced":
      self._connect_at = time.monotonic() + self._pause
      self._pause = min(2 * self._pause, _PAUSES[1])

  def _send(self, request: interface.Request) -> None:
    self._transport.send(wire.STORE, [wire.REQUESTS.encode(request)])

  def _lose(self, reason: str) -> None:
    self._end()
    self._events.append(interface.StoreLost(f"{self.address}: {reason}"))

  def _end(self) -> None:
    self._closed, self._up, self._connect_at = True, False, math.inf
    self._pending.clear()
    self._transport.disconnect(wire.STORE)
