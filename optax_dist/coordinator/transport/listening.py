"""Where a process listens, and the address that it gives to others."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from optax_dist.coordinator.transport import addresses


class Listeners(NamedTuple):
  """The sockets on which a process listens.

  Attributes:
    sockets: the sockets.
    address: what peers connect to.
    port: the port; None if only this host can connect.
  """

  sockets: list[socket.socket]
  address: str
  port: int | None


def listen(
  bind: str | None,
  ports: Sequence[int],
  advertise: str | None,
  towards: str | None,
  secured: bool,
) -> Listeners:
  """Starts to listen; see `sockets.Transport`.

  Args:
    bind: host name or IP address; None: see `addresses.own`.
    ports: the first free port is used.
    advertise: the address that other hosts use instead of `bind`.
    towards: a host that all replicas reach.
    secured: whether peers have to authenticate.

  Raises:
    ValueError: an option is invalid; the message says why.
    OSError: no port is free.
  """
  ways: list[addresses.Endpoint] = []
  listeners: list[socket.socket] = []
  port = None
  own = addresses.own(bind, towards)
  if own is None and not addresses.has_unix():
    own = addresses.bound("127.0.0.1")
  if own is not None:
    ip = own.text
    if not (addresses.is_loopback(ip) or secured):
      raise ValueError(
        f"A secret or certificates are needed to listen on {ip}, where"
        " anyone may connect. Pass secret=, of at least 16 bytes, or set"
        " OPTAX_DIST_SECRET."
      )
    advertised = advertise or addresses.advertised(ip, towards)
    is_host = addresses.is_ip(advertised) or ":" not in advertised
    some_port = addresses.Endpoint(advertised, 1)
    try:
      ways = addresses.parse(str(some_port) if is_host else advertised)
    except ValueError:
      # Checked here: otherwise every other process would fail when it connects.
      raise ValueError(
        "advertise must be a host that others reach, such as 10.0.0.3, or"
        f" host:port, such as 10.0.0.3:29400; got {advertised!r:.200}."
      ) from None
    listeners.append(_bound(own, ports))
    port = listeners[0].getsockname()[1]
    if is_host:
      ways = [addresses.Endpoint(advertised, port)]
  if addresses.has_unix():
    unix = f"optax-dist-{secrets.token_hex(12)}"
    listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listeners[-1].bind("\0" + unix)
    listeners[-1].listen(256)
    ways.append(addresses.Endpoint(unix=unix))
  return Listeners(listeners, ",".join(map(str, ways)), port)


def _bound(ip: addresses.Ip, ports: Sequence[int]) -> socket.socket:
  for port in ports:
    try:
      return socket.create_server(
        ip.sockaddr(port),
        family=ip.family,
        backlog=256,
        dualstack_ipv6=ip.text == "::" and socket.has_dualstack_ipv6(),
      )
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
  text = f"Each port from {ports[0]} to {ports[-1]} of {ip.text} is taken."
  if len(ports) == 1:
    text = (
      f"Another program listens at {addresses.Endpoint(ip.text, ports[0])}."
    )
  raise OSError(errno.EADDRINUSE, text)
