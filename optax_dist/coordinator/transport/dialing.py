"""Connects to peers: which endpoint is tried next, and when a peer counts as lost.

Endpoints are tried in their order, one at a time, then again after a pause. A single
thread looks up host names, and peers' current addresses, since that may take long.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from optax_dist.coordinator.transport import addresses, handshake, interface
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.coordinator.transport.links import Link, Memory
from optax_dist.coordinator.transport.poller import WRITE, Poller

_PAUSES = (0.05, 0.3)  # Shortest and longest pause between rounds.
# Seconds until a peer that has refused is called again: it needs new certificates.
_REFUSED_PAUSE = 1.0


class Dial:
  """Attempts to reach a peer.

  Attributes:
    until: when it times out.
    at: when the next attempt is due.
    key: key of the peer's run, if it belongs to another run.
    met: whether the peer is known to have listened there.
    reason: why the last attempt failed.
    refusals: endpoints in a row that refused the connection.
    link: the attempt that is under way, if there is one.
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
      key: key of the peer's run, if it belongs to another run.
      met: whether the peer is known to have listened there.
    """
    self.until, self.at, self.key, self.met = until, now, key, met
    self.reason = "no attempt has ended yet"
    self.refusals = 0
    self.link: Link | None = None
    self._ways: Sequence[addresses.Endpoint]
    self._find: Callable[[], str] | None
    self._ways, self._find = ((), ways) if callable(ways) else (ways, None)
    self._index = 0
    self._pause = _PAUSES[0]
    # Why an endpoint has refused in this round, even if others could not be reached.
    self._refusal = ""
    # Endpoints with IP addresses, once they are known.
    self._endpoints: Sequence[addresses.Endpoint] | None = None

  def way(self, looked_up: Callable[[], None]) -> addresses.Endpoint | None:
    """The endpoint to try now; None while host names are looked up.

    Args:
      looked_up: called from another thread as soon as that is done.

    Raises:
      LookupError: there is none; the message says why.
      handshake.Refused: there will be none.
    """
    if self._endpoints is None:
      if self._find is None and all(
        w.unix or addresses.is_ip(w.host) for w in self._ways
      ):
        self._endpoints = self._ways
      else:
        self.at = self.until
        try:
          self._look_up(looked_up)
        except RuntimeError as error:  # Out of threads.
          raise LookupError(f"no look-up: {error}") from None
        return None
    if not self._endpoints:
      if self._refusal:
        raise handshake.Refused(self._refusal)
      raise LookupError(self.reason)
    return self._endpoints[self._index]

  def failed(
    self, how: interface.How, reason: str, now: float
  ) -> tuple[interface.How, str] | None:
    """An attempt has failed.

    Args:
      how: as the kind of a loss.
      reason: human-readable explanation.
      now: the time.

    Returns:
      How the peer is lost, and why; None if it is tried again.
    """
    self.reason = reason
    if how == "refused":
      self._refusal = reason
    self._index += 1
    self.at = now
    if self._index < len(self._endpoints or ()):
      return None
    if self._refusal:
      return "refused", self._refusal
    if how == "gone" and self._find is None:
      return how, reason
    if self._find is None and self.refusals >= self._index and self.met:
      # A process listens at its own address for as long as it lives.
      reason = f"it has ended: its address refuses connections ({reason})"
      return "gone", reason
    self._index, self._endpoints, self.refusals = 0, None, 0
    self.at += self._pause
    self._pause = min(2 * self._pause, _PAUSES[1])
    return None

  def _look_up(self, looked_up: Callable[[], None]) -> None:
    def look() -> None:
      ways = []
      if self._find is not None:
        try:
          self._ways = addresses.parse(self._find())
        except handshake.Refused as error:
          self._ways, self._refusal = (), str(error)
        except ValueError as error:
          self._ways, self.reason = (), str(error)
      for way in self._ways:
        if way.unix or addresses.is_ip(way.host):
          ways.append(way)
          continue
        try:
          ips = addresses.resolve(way.host)
          ways += [addresses.Endpoint(ip.text, way.port) for ip in ips]
        except ValueError as error:
          self.reason = str(error)
      self._endpoints = ways
      self.at = 0.0
      looked_up()

    threading.Thread(target=look, name="optax-dist-dns", daemon=True).start()


class Dialer:
  """The peers to which this process connects, and the attempts under way.

  Attributes:
    dials: the attempts, by peer.
  """

  def __init__(
    self,
    identity: handshake.Identity,
    limits: interface.Limits,
    poller: Poller,
    clock: AwakeClock,
    memories: dict[str, Memory],
    lost: Callable[[str, interface.How, str], None],
  ):
    """Starts without dials.

    Args:
      identity: this process's name, secret and run.
      limits: bounds on time.
      poller: waits for sockets.
      clock: the transport's clock.
      memories: facts about peers from earlier connections.
      lost: called when a peer counts as lost; calls `stop`.
    """
    self._identity, self._limits = identity, limits
    self._poller, self._clock, self._lost = poller, clock, lost
    self._memories = memories
    self.dials: dict[str, Dial] = {}
    # When to call peers again that have refused.
    self._refused: dict[str, float] = {}

  def dial(
    self,
    peer: str,
    ways: Sequence[addresses.Endpoint] | Callable[[], str],
    key: bytes | None,
    met: bool,
  ) -> None:
    """Starts to connect to a peer.

    Args:
      peer: name of the peer.
      ways: its endpoints, or what finds its address.
      key: key of its run, if it belongs to another run.
      met: whether it is known to have listened there, as a peer that was connected.
    """
    now, met = self._clock.now(), met or peer in self._memories
    dial = Dial(ways, now, now + self._limits.connect, key, met)
    dial.at = max(now, self._refused.pop(peer, now))
    self.dials[peer] = dial

  def stop(self, peer: str, kept: Link | None = None) -> None:
    """Stops dialing a peer; closes the attempt under way, if it is not kept."""
    dial = self.dials.pop(peer, None)
    if dial is not None and dial.link not in (None, kept):
      dial.link.close()

  def trouble(self, peer: str) -> str:
    """Why a peer is not connected yet; "" if nothing is known."""
    dial = self.dials.get(peer)
    if dial is None:
      return ""
    if dial.link is not None and dial.link.channel is not None:
      return dial.link.explain_silence()
    return dial.reason

  def due(self) -> float:
    """When to call `check` at the latest, if there are any."""
    return min(
      min(dial.until, dial.at if dial.link is None else dial.link.until)
      for dial in self.dials.values()
    )

  def check(self, now: float) -> None:
    """Begins the attempts that are due, and ends attempts that took too long."""
    for peer, dial in list(self.dials.items()):
      link = dial.link
      if link is not None and now >= link.until:
        self.failed(link, "broken", link.explain_silence())
      elif now >= dial.until:
        within = f"no connection within {self._limits.connect:g} s"
        self._lost(peer, "unreachable", f"{within}; last: {dial.reason}")
      elif now >= dial.at and dial.link is None:
        self._attempt(peer, dial)

  def failed(self, link: Link, how: interface.How, reason: str) -> None:
    """An attempt has failed: another one follows, or the peer is lost."""
    link.close()
    dial = self.dials.get(link.peer)
    if dial is not None and dial.link is link:
      dial.link = None
      self._again(link.peer, dial, how, reason)

  def unconnected(self, link: Link, code: int) -> None:
    """The socket of an attempt could not be connected."""
    if code == errno.ECONNREFUSED:
      self.dials[link.peer].refusals += 1
    reason = f"{link.endpoint}: {os.strerror(code)}"
    self.failed(link, "unreachable", reason)

  def close(self) -> None:
    """Closes the sockets of all attempts, without a word."""
    for dial in self.dials.values():
      if dial.link is not None:
        dial.link.sock.close()

  def _attempt(self, peer: str, dial: Dial) -> None:
    try:
      way = dial.way(self._poller.wake)
    except handshake.Refused as error:
      self._again(peer, dial, error.how, str(error))
      return
    except LookupError as error:
      self._again(peer, dial, "unreachable", str(error))
      return
    if way is None:
      return
    try:
      link, code = self._connect(peer, dial, way)
    except (OSError, TypeError, ValueError) as error:
      # No such endpoint is possible, as without IPv6; or descriptors or memory ran out.
      self._again(peer, dial, "unreachable", f"{way}: {error}")
      return
    dial.link = link
    if code == errno.EAGAIN and link.is_local:
      self.failed(link, "unreachable", f"{way}: its backlog is full")
    elif code not in (0, errno.EINPROGRESS):
      self.unconnected(link, code)

  def _connect(
    self, peer: str, dial: Dial, way: addresses.Endpoint
  ) -> tuple[Link, int]:
    """Begins an attempt; returns it, and the error code of `connect`."""
    sockaddr: Any = "\0" + way.unix
    family = socket.AF_UNIX
    if not way.unix:
      (ip,) = addresses.resolve(way.host)  # The host is an IP address already.
      family, sockaddr = ip.family, ip.sockaddr(way.port)
    elif not addresses.has_unix():
      raise ValueError("this system has no abstract Unix sockets")
    memory = self._memories.get(peer)
    shake = handshake.Handshake(
      dial.key or self._identity.key,
      self._identity.name,
      peer,
      handshake.NO_SESSION if memory is None else memory.last,
    )
    # Half of the time that is left, so that no endpoint uses up the time of the others.
    now = self._clock.now()
    share = min((dial.until - now) / 2, self._limits.handshake)
    until = now + max(0.5, share)
    sock = socket.socket(family, socket.SOCK_STREAM)
    link = Link(sock, WRITE, shake, until, self._poller, self._clock)
    link.peer, link.endpoint = peer, way
    try:
      return link, sock.connect_ex(sockaddr)
    except BaseException:
      link.close()
      raise

  def _again(
    self, peer: str, dial: Dial, how: interface.How, reason: str
  ) -> None:
    loss = dial.failed(how, reason, self._clock.now())
    if loss is not None:
      if loss[0] == "refused":
        now = self._clock.now()
        waits = {p: at for p, at in self._refused.items() if at > now}
        self._refused = waits | {peer: now + _REFUSED_PAUSE}
      self._lost(peer, *loss)
