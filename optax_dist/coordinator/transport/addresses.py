"""The address a process listens on, and the one it advertises.

An address is text such as ``10.0.0.3:29400,unix:3f9a``: a list of endpoints, of
which a peer uses the first one that works. A ``unix:`` name is an abstract
socket of Linux: it is reachable only from the same network namespace, so
whether two processes share a host is tested, never guessed.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import sys
from typing import NamedTuple

# Below the ephemeral ports of common systems, and below this library's
# defaults.
_QUIET_PORTS = range(10000, 29000)
# A documentation range: only a route is looked up, and no packet is sent.
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


class Endpoint(NamedTuple):
  """One endpoint of a process: a host and port, or a name on this host.

  Attributes:
    host: IP address or host name; "" for a socket of this host.
    port: from 1 to 65535; 0 for a socket of this host.
    unix: the abstract name; "" if there is none.
  """

  host: str = ""
  port: int = 0
  unix: str = ""

  def __str__(self) -> str:
    if self.unix:
      return f"unix:{self.unix}"
    return (
      f"[{self.host}]:{self.port}"
      if ":" in self.host
      else (f"{self.host}:{self.port}")
    )


def parse(address: str) -> list[Endpoint]:
  """The endpoints in an address, local ones first.

  Raises:
    ValueError: it is not an address.

  Example:
    >>> [str(way) for way in parse("[::1]:29400,unix:3f9a")]
    ['unix:3f9a', '[::1]:29400']
  """
  ways = []
  for part in address.split(","):
    if part.startswith("unix:") and 5 < len(part) <= 100:
      ways.append(Endpoint(unix=part[5:]))
      continue
    host, colon, port = part.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    # Without brackets, the end of an IPv6 address would be taken for a port.
    whole = ":" not in bare or host == f"[{bare}]"
    is_host = bare and whole and bare.isprintable() and not {*" /"} & {*bare}
    if not (colon and is_host and port.isdecimal() and 0 < int(port) < 65536):
      raise ValueError(
        "An address is host:port, such as 10.0.0.3:29400 or [fd00::3]:29400,"
        f" optionally followed by ,unix:name; got {address!r:.200}."
      )
    ways.append(Endpoint(bare, int(port)))
  return sorted(ways, key=lambda way: not way.unix)


def parse_ports(text: str) -> range:
  """Parses a port or a range of ports.

  Example:
    >>> parse_ports("29400"), parse_ports("29400-29499")
    (range(29400, 29401), range(29400, 29500))
  """
  first, dash, last = text.partition("-")
  if first.isdecimal() and (last.isdecimal() or not dash):
    found = range(int(first), int(last or first) + 1)
    if found and found[-1] < 65536:
      return found
  raise ValueError(f"Ports are 29400 or 29400-29499; got {text!r}.")


def has_unix() -> bool:
  """Whether this system has abstract Unix sockets."""
  return sys.platform == "linux"


def is_ip(host: str) -> bool:
  """Whether a host is given as an IP address."""
  try:
    ipaddress.ip_address(host.partition("%")[0])
  except ValueError:
    return False
  return True


def is_loopback(host: str) -> bool:
  """Whether a host name or address always means this host."""
  if not is_ip(host):
    return host == "localhost"
  return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def bound(host: str) -> tuple[socket.AddressFamily, str]:
  """The family and IP address to listen on.

  On many hosts, their own name resolves to loopback (127.0.1.1), which other
  hosts could not reach; then all addresses are used.

  Raises:
    ValueError: the host is unknown.
  """
  try:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError) as error:
    raise ValueError(f"bind={host!r} is no address here: {error}.") from None
  far = [f for f in found if not is_loopback(str(f[4][0]))]
  if far or is_loopback(host):
    family, _, _, _, place = (far or found)[0]
    return socket.AddressFamily(family), str(place[0])
  return socket.AF_INET, "0.0.0.0"


def is_own(host: str) -> bool:
  """Whether this process can listen on a host's address."""
  try:
    family, ip = bound(host)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((ip, 0))
  except (OSError, ValueError):
    return False
  return True


def advertised(ip: str, towards: str | None = None) -> str:
  """The IP address that others use to reach a process listening on `ip`.

  Args:
    ip: the address it listens on; may be the wildcard address.
    towards: host name or IP address that all replicas reach, such as the
      store's. The address from which this host reaches it is advertised.

  Raises:
    ValueError: this host has only loopback addresses.
  """
  if not ipaddress.ip_address(ip.partition("%")[0]).is_unspecified:
    return ip
  families = [socket.AF_INET, socket.AF_INET6]
  if ip == "::":
    families.reverse()
  for target in (towards, None):
    for family in families:
      found = _source(family, target or _ANYWHERE[family])
      if found and not is_loopback(found):
        return found
  if towards is not None and not is_ip(towards):
    try:
      socket.getaddrinfo(towards, None)
    except (OSError, UnicodeError) as error:
      raise ValueError(
        f"The store's host name {towards!r} can't be resolved: {error}."
      ) from None
  raise ValueError(
    f"This host has no address that others could reach (listening on {ip})."
    " Pass its address as others see it: advertise=, or launch --local-addr."
  )


def free_ports(count: int = 1) -> list[int]:
  """Returns loopback ports for servers that are started later.

  The system does not assign these on its own. Of the ephemeral ports, one that
  is free now may be the local end of a connection by then, even of a connection
  to itself, made by a client that dials before the server is up. They are drawn
  at random: two processes that ask at the same time hardly get the same one.

  Args:
    count: the number of ports.

  Raises:
    OSError: there are not enough.

  Example:
    >>> one, two = free_ports(2)
    >>> one != two
    True
  """
  found: list[int] = []
  for port in random.SystemRandom().sample(_QUIET_PORTS, len(_QUIET_PORTS)):
    if len(found) == count:
      break
    with socket.socket() as probe:
      try:
        probe.bind(("127.0.0.1", port))
      except OSError:
        continue
    found.append(port)
  if len(found) < count:
    raise OSError(
      f"Only {len(found)} of {count} ports are free from {_QUIET_PORTS[0]} to"
      f" {_QUIET_PORTS[-1]}."
    )
  return found


def _source(family: socket.AddressFamily, target: str) -> str | None:
  """The address from which this host reaches the target, without a packet."""
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as s:
      place = socket.getaddrinfo(target, 9, family, socket.SOCK_DGRAM)[0][4]
      s.connect(place)
      found = str(s.getsockname()[0])
  except (OSError, UnicodeError):  # Unicode: a label is empty, or too long.
    return None
  return None if ipaddress.ip_address(found).is_unspecified else found
