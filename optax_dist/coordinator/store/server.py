"""What a store process does: it keeps keys for the members of one job.

It listens to members of the job alone: the transport's handshake keeps out who
does not know the secret, and a quota bounds what a member can fill. What it
keeps is in memory only; a run that must survive the loss of this process uses
etcd.
"""

from __future__ import annotations

import logging
import secrets

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface, table, wire
from optax_dist.coordinator.transport import interface as transports

_log = logging.getLogger("optax_dist.coordinator")
_MAX_WATCHES = 64


class StoreServer:
  """Answers the clients that connect to a transport.

  Attributes:
    clients: how many are connected.
    refused: how many messages were none that a client sends.
  """

  def __init__(
    self, transport: transports.Transport, quota: table.Quota | None = None
  ):
    """A store without keys.

    Args:
      transport: named `wire.STORE`; it is the server's from now on.
      quota: what it holds at most.
    """
    self._transport = transport
    self._table = table.Table(quota)
    self._watches: dict[str, dict[int, str]] = {}
    self._identity = secrets.token_hex(8)
    self.refused = 0

  @property
  def clients(self) -> int:
    return len(self._watches)

  def poll(self, timeout: float | None) -> None:
    """Answers what has come, and waits for more if nothing has."""
    for event in self._transport.poll(timeout):
      match event:
        case transports.PeerUp(peer):
          self._watches[peer] = {}
          self._send(peer, wire.Welcome(self._identity))
        case transports.PeerLost(peer):
          self._watches.pop(peer, None)
        case transports.Message(peer, payload):
          if peer in self._watches:
            self._receive(peer, payload)

  def close(self) -> None:
    """Says goodbye to all clients."""
    self._transport.close("the store has ended")

  def _receive(self, client: str, payload: bytes) -> None:
    try:
      request = wire.REQUESTS.decode(payload)
      self._answer(client, request)
    except (codec.BadMessage, ValueError) as error:
      self.refused += 1
      _log.warning("the store refuses a message of %s: %s", client, error)
      self._watches.pop(client, None)
      self._transport.disconnect(client, f"it sent what is no request: {error}")

  def _answer(self, client: str, request: wire.Request) -> None:
    match request:
      case wire.Watch(watch, prefix, since):
        interface.check_key(prefix)
        self._watches[client][watch] = prefix
        if len(self._watches[client]) > _MAX_WATCHES:
          raise ValueError(f"more than {_MAX_WATCHES} watches")
        for key, entry in self._table.since(prefix, since):
          told = wire.Told(watch, entry.revision, key, entry.value)
          self._send(client, told)
        self._send(client, interface.Current(watch))
      case wire.Unwatch(watch):
        self._watches[client].pop(watch, None)
      case _:
        interface.check(request)
        before = self._table.revision
        self._send(client, self._table.answer(client, request))
        if self._table.revision != before:
          assert isinstance(request, interface.PutIfAbsent | interface.Put)
          self._publish(request.key, request.value)

  def _publish(self, key: str, value: bytes) -> None:
    # Most clients give their watch of a prefix the same number.
    encoded: dict[int, list[bytes]] = {}
    for client, watches in self._watches.items():
      for watch, prefix in watches.items():
        if table.under(prefix, key):
          if watch not in encoded:
            told = wire.Told(watch, self._table.revision, key, value)
            encoded[watch] = wire.REPLIES.parts(told)
          self._transport.send(client, encoded[watch])

  def _send(self, client: str, reply: wire.Reply) -> None:
    self._transport.send(client, wire.REPLIES.parts(reply))
