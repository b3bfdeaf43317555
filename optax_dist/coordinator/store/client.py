"""A client of a store process; it survives broken connections."""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface, wire
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

_PAUSES = (0.05, 0.3)  # Shortest and longest pause before reconnecting.


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
    self._events: list[interface.Event] = []
    self._requests = interface.Requests(self.address, transport.now)
    self._store = ""
    self._up = self._closed = False
    self._connect_at, self._pause = math.inf, _PAUSES[0]
    self._detail = "not connected yet"
    self._connect()

  def ask(self, request: interface.Request, timeout: float) -> None:
    self._requests.add(request, timeout)
    if self._up:
      self._send(request)

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
    expires = self._requests.deadline()
    if self._connect_at == math.inf:
      return expires
    connects = max(0.0, self._connect_at - self._transport.now())
    return connects if expires is None else min(connects, expires)

  def poll(self) -> list[interface.Event]:
    if self._transport.now() >= self._connect_at:
      self._connect()
    events, self._events = self._events, []
    return events + self._requests.expired(self._why())

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
        self._lose("it was restarted, and its keys are lost")
        return
      self._store, self._up, self._pause = reply.store, True, _PAUSES[0]
      self._detail = "connected"
      for request in self._requests:
        self._send(request)
    elif self._requests.remove(reply.request):
      self._events.append(reply)

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
      self._connect_at = self._transport.now() + self._pause
      self._pause = min(2 * self._pause, _PAUSES[1])

  def _send(self, request: interface.Request) -> None:
    self._transport.send(wire.STORE, [wire.REQUESTS.encode(request)])

  def _lose(self, reason: str) -> None:
    self._end()
    self._events.append(interface.StoreLost(f"{self.address}: {reason}"))

  def _end(self) -> None:
    self._closed, self._up, self._connect_at = True, False, math.inf
    self._requests.clear()
    self._transport.disconnect(wire.STORE)
