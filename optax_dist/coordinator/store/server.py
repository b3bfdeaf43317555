"""The server of a store process: it keeps keys for the members of one job.

Only members of the job can connect: the transport's handshake rejects processes
that don't know the secret, and a quota limits what a member can fill. All data
is in memory only; a run that must survive the loss of this process uses etcd.
"""

from __future__ import annotations

import logging
import secrets

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import interface, table, wire
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

_log = logging.getLogger("optax_dist.coordinator")


class StoreServer:
  """Answers clients that connect to a transport.

  Attributes:
    clients: how many are connected.
    refused: how many invalid messages were received.
  """

  def __init__(self, transport: sockets.Transport, quota: int = table.QUOTA):
    """Creates a store without keys.

    Args:
      transport: named `wire.STORE`; the server owns it from now on.
      quota: the most bytes that it holds.
    """
    self._transport = transport
    self._table = table.Table(quota)
    self._identity = secrets.token_hex(8)
    self.refused = 0

  @property
  def clients(self) -> int:
    return len(self._transport.peers())

  def poll(self, timeout: float | None) -> None:
    """Answers requests, and waits for more if there are none."""
    for event in self._transport.poll(timeout):
      match event:
        case transports.PeerUp(peer):
          self._send(peer, wire.Welcome(self._identity))
        case transports.Message(peer, payload):
          self._receive(peer, payload)

  def close(self) -> None:
    """Says goodbye to all clients."""
    self._transport.close("the store has ended")

  def _receive(self, client: str, payload: bytes) -> None:
    try:
      request = wire.REQUESTS.decode(payload)
      interface.check(request)
      self._send(client, self._table.answer(client, request))
    except (codec.BadMessage, ValueError) as error:
      self.refused += 1
      _log.warning("the store refuses a message of %s: %s", client, error)
      self._transport.disconnect(client, f"it sent an invalid request: {error}")

  def _send(self, client: str, reply: wire.Reply) -> None:
    self._transport.send(client, [wire.REPLIES.encode(reply)])
