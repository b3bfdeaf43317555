"""The processes that a replica is connected to, and why others are not reached."""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol import inputs, liveness
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.transport import interface as transports

# Seconds for which a coordinator may be silent before it is known how long it is.
_SILENT = 7.0


class Peers:
  """The peers of one process.

  Attributes:
    unreached: why another one could not be called; "" once this one is admitted.
  """

  def __init__(self, endpoint: endpoints.Endpoint, silence: liveness.Rule):
    """Starts without any.

    Args:
      endpoint: the transport, and where the coordinator is.
      silence: how long this process and its coordinator may be silent to each other.
    """
    self.unreached = ""
    self._endpoint, self._transport = endpoint, endpoint.transport
    # It compiles nothing meanwhile, and people are to know soon.
    first = min(silence.first, _SILENT)
    self._silence = dataclasses.replace(silence, first=first)

  def disconnect(self, peer: str, reason: str) -> None:
    """Executes `Disconnect`."""
    trouble = self._transport.trouble(peer)
    if trouble:
      self._could_not_reach(peer, trouble)
    self._transport.disconnect(peer, reason)

  def up(self, event: transports.PeerUp) -> None:
    """One is connected."""
    if event.peer == endpoints.COORDINATOR:
      self._transport.allow(event.peer, self._silence)

  def lost(self, event: transports.PeerLost) -> inputs.PeerLost:
    """One is lost: what the core must know of it."""
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
