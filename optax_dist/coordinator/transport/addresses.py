"""Where a process listens, and the address that it tells others.

An address is text such as ``10.0.0.3:29400,unix:3f9a``: the ways to a process,
of which a peer takes the first one that leads there. A ``unix:`` name is one of
Linux's abstract sockets: it is reachable from the same network namespace only,
so whether two processes share a host is tried, and never guessed.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import sys
from typing import NamedTuple

# Below those that systems hand out by themselves, and below this library's own.
_QUIET_PORTS = range(20000, 29000)
# A documentation range: no packet is sent there, only a route looked up.
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


class Endpoint(NamedTuple):
  """One way to a process: a host and port, or a name on this host.

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
  """The ways in an address, those of this host first.

  Raises:
    ValueError: it isn't one.

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
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
      raise ValueError(
        "An address is host:port, such as 10.0.0.3:29400, with unix:name"
        f" beside it or not; got {address!r:.200}."
      )
    ways.append(Endpoint(host, int(port)))
  return sorted(ways, key=lambda way: not way.unix)


def parse_ports(text: str) -> range:
  """A port, or a range of ports.

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
  """Whether this system has abstract names."""
  return sys.platform == "linux"


def is_ip(host: str) -> bool:
  """Whether a host is written as an IP address."""
  try:
    ipaddress.ip_address(host.partition("%")[0])
  except ValueError:
    return False
  return True


def is_loopback(host: str) -> bool:
  """Whether a host, as it is written, can only be this one."""
  if not is_ip(host):
    return host == "localhost"
  return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def bound(host: str) -> tuple[socket.AddressFamily, str]:
  """The family and IP address to listen on.

  In its own tables a host's name often stands for loopback (127.0.1.1), where
  no other host would get through; all addresses are taken then.

  Raises:
    ValueError: the host is not known.
  """
  try:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except OSError as error:
    raise ValueError(f"bind={host!r} is no address here: {error}.") from None
  far = [f for f in found if not is_loopback(str(f[4][0]))]
  if far or is_loopback(host):
    family, _, _, _, place = (far or found)[0]
    return socket.AddressFamily(family), str(place[0])
  return socket.AF_INET, "0.0.0.0"


def is_own(host: str) -> bool:
  """Whether this process could listen at a host's address."""
  try:
    family, ip = bound(host)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((ip, 0))
  except (OSError, ValueError):
    return False
  return True


def advertised(ip: str, towards: str | None = None) -> str:
  """The IP address at which others reach a process that listens on `ip`.

  Args:
    ip: what it listens on; perhaps all addresses.
    towards: host name or IP address of something that all replicas reach, such
      as the store. The address from which this host reaches it is a good one.

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
  raise ValueError(
    f"This host has no address that others could reach (listening on {ip})."
    " Pass advertise=, the address of this host as others see it."
  )


def free_ports(count: int = 1) -> list[int]:
  """Ports of loopback for servers that are started later.

  The system hands out none of these by itself. Of those that it does, one that is
  free now may be the near end of somebody's connection by then, even of a
  connection to itself, made by who dials it before the server is there.

  Args:
    count: how many.

  Raises:
    OSError: there are not so many.

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
  with socket.socket(family, socket.SOCK_DGRAM) as s:
    try:
      place = socket.getaddrinfo(target, 9, family, socket.SOCK_DGRAM)[0][4]
      s.connect(place)
      found = str(s.getsockname()[0])
    except OSError:
      return None
  return None if ipaddress.ip_address(found).is_unspecified else found
