"""The processes that a replica is connected to, and why it can't reach others."""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol import inputs, liveness
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.transport import interface as transports

# Seconds for which a coordinator may be silent before its usual silence is known.
_SILENT = 7.0


class Peers:
  """The peers of one process.

  Attributes:
    unreached: why another process could not be reached; "" once the replica has joined.
  """

  def __init__(self, endpoint: endpoints.Endpoint, silence: liveness.Rule):
    """Starts without peers.

    Args:
      endpoint: the transport, and where the coordinator is.
      silence: how long this process and its coordinator may be silent to each other.
    """
    self.unreached = ""
    self._endpoint, self._transport = endpoint, endpoint.transport
    # The coordinator compiles no programs, so even at first a long silence means a
    # loss, of which the user should hear soon.
    first = min(silence.first, _SILENT)
    self._silence = dataclasses.replace(silence, first=first)

  def disconnect(self, peer: str, reason: str) -> None:
    """Executes `Disconnect`."""
    trouble = self._transport.trouble(peer)
    if trouble:
      self._could_not_reach(peer, trouble)
    self._transport.disconnect(peer, reason)

  def up(self, event: transports.PeerUp) -> None:
    """A peer is connected."""
    if event.peer == endpoints.COORDINATOR:
      self._transport.allow(event.peer, self._silence)

  def lost(self, event: transports.PeerLost) -> inputs.PeerLost:
    """A peer is lost; returns the input for the core."""
    peer, how, reason = event.peer, event.how, event.reason
    if peer == endpoints.COORDINATOR:
      self._endpoint.revive(how)
    elif how in ("unreachable", "gone", "refused"):
      self._could_not_reach(peer, reason)
    return inputs.PeerLost(peer, how, reason)

  def moved(self) -> transports.PeerLost:
    """The loss of a coordinator that another process has replaced."""
    why = "another process is the coordinator now"
    self._transport.disconnect(endpoints.COORDINATOR, why)
    return transports.PeerLost(endpoints.COORDINATOR, "broken", why)

  def _could_not_reach(self, peer: str, why: str) -> None:
    who = f"Process {peer}"
    if peer == endpoints.COORDINATOR:
      who = "The coordinator"
    self.unreached = f"{who} could not be reached: {why}"
