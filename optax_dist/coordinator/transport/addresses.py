"""The address a process listens on, and the one it advertises.

Families and loopback are what names resolve to, and that is asked only here.

An address is text such as ``10.0.0.3:29400,unix:3f9a``: a list of endpoints, of
which a peer uses the first one that works. A ``unix:`` name is an abstract
socket of Linux: it is reachable only from the same network namespace, so
whether two processes share a host is tested, never guessed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import random
import socket
import sys
import time
from typing import Any, NamedTuple

_log = logging.getLogger("optax_dist.coordinator")

# Below the ephemeral ports of common systems, and below this library's
# defaults.
_QUIET_PORTS = range(10000, 29000)
# A documentation range: only a route is looked up, and no packet is sent.
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
# The longest wait for a name that is not known yet, and from one look to the next.
_UNKNOWN_SECONDS, _AGAIN_SECONDS = 30.0, 0.5
_EVERYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


class Ip(NamedTuple):
  """An IP address.

  Attributes:
    family: socket family, of IPv4 or IPv6.
    text: the address; a link-local one has its interface (fe80::1%eth0).
  """

  family: socket.AddressFamily
  text: str

  def sockaddr(self, port: int) -> Any:
    """The address in the form that `socket.connect` and `bind` take.

    Raises:
      OSError: there is no such interface.
    """
    if "%" not in self.text:
      return self.text, port
    flags = socket.AI_NUMERICHOST
    candidates = socket.getaddrinfo(self.text, port, self.family, flags=flags)
    return candidates[0][4]


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
    else:
      ways.append(_endpoint(part, address))
  return sorted(ways, key=lambda way: not way.unix)


def endpoint(address: str) -> Endpoint:
  """The only endpoint in an address of the form ``host:port``.

  Raises:
    ValueError: it is not one.

  Example:
    >>> endpoint("[fd00::3]:29400")
    Endpoint(host='fd00::3', port=29400, unix='')
  """
  return _endpoint(address, address)


def _endpoint(text: str, address: str) -> Endpoint:
  host, colon, port = text.rpartition(":")
  bare = host.removeprefix("[").removesuffix("]")
  # Without brackets, the end of an IPv6 address would be taken for a port.
  whole = ":" not in bare or host == f"[{bare}]"
  is_host = bare and whole and bare.isprintable() and not {*" /"} & {*bare}
  if not (colon and is_host and port.isdecimal() and 0 < int(port) < 65536):
    # Only the part after "@": a mistyped URL of etcd may contain a password.
    shown = address.rpartition("@")[2]
    raise ValueError(
      "An address is host:port, such as 10.0.0.3:29400 or [fd00::3]:29400; got"
      f" {shown!r:.200}."
    )
  return Endpoint(bare, int(port))


def parse_ports(text: str) -> range:
  """Parses a port or a range of ports.

  Example:
    >>> parse_ports("29400"), parse_ports("29400-29499")
    (range(29400, 29401), range(29400, 29500))
  """
  first, dash, last = text.partition("-")
  if first.isdecimal() and (last.isdecimal() or not dash):
    ports = range(int(first), int(last or first) + 1)
    if ports and ports[-1] < 65536:
      return ports
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
  """Whether a host name or address always means this host; nothing is looked up."""
  if not is_ip(host):
    return host == "localhost"
  return _plain(host).is_loopback


def resolve(host: str) -> list[Ip]:
  """The IP addresses of a host, in the order of the system.

  An IPv4 address in the form of IPv6 (::ffff:10.0.0.3) is that IPv4 address. A
  link-local one keeps its interface (fe80::1%eth0).

  Raises:
    ValueError: it is unknown.

  Example:
    >>> resolve("::ffff:127.0.0.1")
    [Ip(family=<AddressFamily.AF_INET: 2>, text='127.0.0.1')]
  """
  if is_ip(host):
    return [_ip_of((host,))]
  try:
    candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except (
    OSError,
    UnicodeError,
  ) as error:  # Unicode: a label is empty, or too long.
    raise ValueError(f"the name {host!r} can't be resolved: {error}") from None
  return list(dict.fromkeys(_ip_of(candidate[4]) for candidate in candidates))


def _check_interface(host: str) -> None:
  """Refuses an address that is another one on each of this host's networks."""
  address = _plain(host) if is_ip(host) else None
  if address is None or address.version == 4 or not address.is_link_local:
    return
  _, _, interface = host.partition("%")
  names = [name for _, name in socket.if_nameindex()]
  if interface not in names and not interface.isdecimal():
    raise ValueError(
      f"{host} is link-local, so it needs the name of an interface of this host, as in"
      f" {address}%{names[-1]}; the interfaces are {', '.join(names)}"
    )


def wait_for(host: str, timeout: float = math.inf) -> None:
  """Waits until a name is known, as that of a pod is soon after its start.

  Args:
    host: name or address of the coordinator.
    timeout: seconds to wait, if that is less than usual. Whoever uses the name then
      says that it is unknown.
  """
  seconds = min(timeout, _UNKNOWN_SECONDS)
  end, said = time.monotonic() + seconds, False
  while True:
    try:
      resolve(host)
      return
    except ValueError as error:
      if time.monotonic() >= end:
        return
      if not said:
        _log.warning("%s. It is tried again for %g s.", error, seconds)
        said = True
      time.sleep(_AGAIN_SECONDS)


def is_here(host: str) -> bool:
  """Whether a coordinator at this host serves only this host: it is at loopback.

  On many hosts, their own name means loopback to themselves (127.0.1.1, or
  127.0.0.1), and their address to others: that does not count.

  Raises:
    ValueError: the host is unknown.
  """
  if is_ip(host) or is_loopback(host):
    return is_loopback(host)
  ips = {ip.text for ip in resolve(host)}
  mine = socket.gethostname()
  is_mine = host.lower() in (mine.lower(), mine.partition(".")[0].lower())
  return ips <= {"127.0.0.1", "::1"} and not is_mine


def bound(host: str) -> Ip:
  """The IP address to listen on.

  On many hosts, their own name resolves to loopback (127.0.1.1), which other
  hosts could not reach; then all addresses are used.

  Raises:
    ValueError: the host is unknown, or link-local without an interface of this host.
  """
  try:
    _check_interface(host)
    ips = resolve(host)
  except ValueError as error:
    raise ValueError(f"bind={host!r} is no address here: {error}.") from None
  far = [ip for ip in ips if not is_loopback(ip.text)]
  if far or is_here(host):
    return (far or ips)[0]
  return everywhere()


def everywhere(towards: str | None = None) -> Ip:
  """The wildcard address to listen on, of the family in which hosts are reached.

  Args:
    towards: a host that all replicas reach; None for any.

  Raises:
    ValueError: the host is unknown.
  """
  targets = [] if towards is None else resolve(towards)
  targets += [Ip(family, ip) for family, ip in _ANYWHERE.items()]
  for family, target in targets:
    if not is_loopback(_source(family, target) or "localhost"):
      return Ip(family, _EVERYWHERE[family])
  return Ip(socket.AF_INET, _EVERYWHERE[socket.AF_INET])


def is_own(host: str) -> bool:
  """Whether this process can listen on a host's address."""
  try:
    ip = bound(host)
    with socket.socket(ip.family, socket.SOCK_STREAM) as probe:
      probe.bind(ip.sockaddr(0))
  except (OSError, ValueError):
    return False
  return True


def own(bind: str | None, towards: str | None) -> Ip | None:
  """The address on which a process of a job listens.

  Args:
    bind: host name or address that was chosen; None: loopback if `towards`
      is, and all addresses otherwise.
    towards: the host of the coordinator, which all replicas reach.

  Returns:
    The address; None if only this host is to connect.

  Raises:
    ValueError: a host is unknown, or link-local without an interface of this host.
  """
  if bind is not None:
    return bound(bind)
  if towards is None:
    return None
  try:
    _check_interface(towards)
    return None if is_here(towards) else everywhere(towards)
  except ValueError as error:
    raise ValueError(
      f"The coordinator is not found: {error}. Is its address right, and does this host"
      " know the name?"
    ) from None


def advertised(ip: str, towards: str | None = None) -> str:
  """The IP address that others use to reach a process listening on `ip`.

  Args:
    ip: the address it listens on; may be the wildcard address.
    towards: host name or IP address that all replicas reach, such as the
      coordinator's. The address from which this host reaches it is advertised.

  Raises:
    ValueError: this host has only loopback addresses, or `towards` is unknown.
  """
  if not _plain(ip).is_unspecified:
    return ip
  targets, unknown = [], ""
  try:
    targets += [] if towards is None else resolve(towards)
  except ValueError as error:
    unknown = str(error)
  targets += [Ip(family, some) for family, some in _ANYWHERE.items()]
  # A listener of IPv4 can't be reached at an address of IPv6.
  families = [socket.AF_INET6] if ":" in ip else [socket.AF_INET]
  if ":" in ip and socket.has_dualstack_ipv6():
    families.append(socket.AF_INET)
  for family in families:
    for target in targets:
      source = target.family == family and _source(family, target.text)
      if source and not is_loopback(source):
        return source
  if unknown:
    raise ValueError(f"The coordinator is not found: {unknown}.")
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
  ports: list[int] = []
  for port in random.SystemRandom().sample(_QUIET_PORTS, len(_QUIET_PORTS)):
    if len(ports) == count:
      break
    with socket.socket() as probe:
      try:
        probe.bind(("127.0.0.1", port))
      except OSError:
        continue
    ports.append(port)
  if len(ports) < count:
    raise OSError(
      f"Only {len(ports)} of {count} ports are free from {_QUIET_PORTS[0]} to"
      f" {_QUIET_PORTS[-1]}."
    )
  return ports


def _source(family: socket.AddressFamily, target: str) -> str | None:
  """The address from which this host reaches the target, without a packet."""
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as s:
      s.connect(Ip(family, target).sockaddr(9))
      ip = _ip_of(s.getsockname()).text
  except (OSError, ValueError):
    return None
  return None if _plain(ip).is_unspecified else ip


def _plain(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
  """An IP address without its interface; one of IPv4 in the form of IPv6 as such."""
  address = ipaddress.ip_address(ip.partition("%")[0])
  mapped = address.ipv4_mapped if address.version == 6 else None
  return mapped or address


def _ip_of(sockaddr: Any) -> Ip:
  """The IP address in what the `socket` module calls an address."""
  text = str(sockaddr[0])
  ip = _plain(text)
  if ip.version == 4:
    return Ip(socket.AF_INET, str(ip))
  scope = sockaddr[3] if len(sockaddr) > 3 else 0
  if scope and "%" not in text:
    with contextlib.suppress(OSError):
      text += f"%{socket.if_indextoname(scope)}"
  return Ip(socket.AF_INET6, text)
