"""Attempts to reach a peer: which endpoint comes next, and when it is lost.

Endpoints are tried in their order, then again after a pause. There are no
sockets here; the only thread looks up host names, or asks where a peer is by now,
since that may take long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from optax_dist.coordinator.transport import addresses, handshake, interface

_PAUSES = (0.05, 0.3)  # Shortest and longest pause between rounds.


class Dial:
  """Attempts to reach a peer.

  Attributes:
    until: when it times out.
    at: when the next attempt is due.
    key: of the peer's run, if it belongs to another one.
    met: whether the peer is known to have listened there.
    reason: why the last attempt failed.
    refusals: endpoints in a row that refused the connection.
  """

  def __init__(
    self,
    ways: Sequence[addresses.Endpoint] | Callable[[], str],
    now: float,
    until: float,
    key: bytes | None = None,
    met: bool = False,
  ):
    """Starts with the first endpoint.

    Args:
      ways: the peer's endpoints, which may have host names; or what finds its
        address, before each round.
      now: the time.
      until: when it times out.
      key: of the peer's run, if it belongs to another one.
      met: whether the peer is known to have listened there.
    """
    self.until, self.at, self.key, self.met = until, now, key, met
    self.reason = "no attempt has ended yet"
    self.refusals = 0
    self._ways: Sequence[addresses.Endpoint]
    self._find: Callable[[], str] | None
    self._ways, self._find = ((), ways) if callable(ways) else (ways, None)
    self._index = 0
    self._pause = _PAUSES[0]
    # Why an endpoint of this round refuses, whatever the others do.
    self._refusal = ""
    # Endpoints with IP addresses, once they are known.
    self._found: Sequence[addresses.Endpoint] | None = None

  def way(self, looked_up: Callable[[], None]) -> addresses.Endpoint | None:
    """The endpoint to try now; None while host names are looked up.

    Args:
      looked_up: called from another thread as soon as that is done.

    Raises:
      LookupError: there is none; the message says why.
      handshake.Refused: there will be none.
    """
    if self._found is None:
      if self._find is None and all(
        w.unix or addresses.is_ip(w.host) for w in self._ways
      ):
        self._found = self._ways
      else:
        self.at = self.until
        try:
          self._look_up(looked_up)
        except RuntimeError as error:  # Out of threads.
          raise LookupError(f"no look-up: {error}") from None
        return None
    if not self._found:
      if self._refusal:
        raise handshake.Refused(self._refusal)
      raise LookupError(self.reason)
    return self._found[self._index]

  def failed(
    self, how: interface.How, reason: str, now: float
  ) -> tuple[interface.How, str] | None:
    """An attempt has failed.

    Args:
      how: as the kind of a loss.
      reason: explanation for people.
      now: the time.

    Returns:
      How the peer is lost, and why; None if it is tried again.
    """
    self.reason = reason
    if how == "refused":
      self._refusal = reason
    self._index += 1
    self.at = now
    if self._index < len(self._found or ()):
      return None
    if self._refusal:
      return "refused", self._refusal
    if how == "ended" and self._find is None:
      return how, reason
    if self._find is None and self.refusals >= self._index and self.met:
      # A process listens at its own address for as long as it lives.
      reason = f"it has ended: its address refuses connections ({reason})"
      return "gone", reason
    self._index, self._found, self.refusals = 0, None, 0
    self.at += self._pause
    self._pause = min(2 * self._pause, _PAUSES[1])
    return None

  def _look_up(self, looked_up: Callable[[], None]) -> None:
    def look() -> None:
      found = []
      if self._find is not None:
        try:
          self._ways = addresses.parse(self._find())
        except handshake.Refused as error:
          self._ways, self._refusal = (), str(error)
        except ValueError as error:
          self._ways, self.reason = (), str(error)
      for way in self._ways:
        if way.unix or addresses.is_ip(way.host):
          found.append(way)
          continue
        try:
          ips = addresses.resolve(way.host)
          found += [addresses.Endpoint(ip.text, way.port) for ip in ips]
        except ValueError as error:
          self.reason = str(error)
      self._found = found
      self.at = 0.0
      looked_up()

    threading.Thread(target=look, name="optax-dist-dns", daemon=True).start()
