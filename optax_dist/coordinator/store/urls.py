"""Store URLs."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from optax_dist.coordinator.store import client, interface
from optax_dist.coordinator.transport import addresses, sockets


class Place(Protocol):
  """Where a store is."""

  @property
  def host(self) -> str:
    """The host of the store, or of its first server."""
    ...

  def open(
    self, transport: sockets.Transport, secret: bytes
  ) -> interface.Store:
    """Creates a client of the store.

    Args:
      transport: of the client.
      secret: of the job.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Tcp:
  """A store process.

  Attributes:
    address: its address, as the transport writes it.
  """

  address: str

  @property
  def host(self) -> str:
    """The host of the store process."""
    return addresses.parse(self.address)[0].host

  def open(
    self, transport: sockets.Transport, secret: bytes
  ) -> interface.Store:
    """Creates a client of the process."""
    return client.StoreClient(transport, self.address)


def parse(url: str) -> Place:
  """Parses ``tcp://host:port`` or the URL of an optional store.

  Raises:
    ValueError: it is not a store URL.

  Example:
    >>> parse("tcp://[::1]:29300")
    Tcp(address='[::1]:29300')
  """
  scheme, mark, _ = url.partition("://")
  if mark and scheme == "tcp":
    return _parse_tcp(url)
  raise wrong(url, "it begins with none of these")


def _parse_tcp(url: str) -> Tcp:
  servers = url.partition("://")[2].removesuffix("/")
  if set(servers) & set("@?,"):
    raise wrong(url, "a store process is one host and port, and no more")
  return Tcp(endpoint(url, servers))


def endpoint(url: str, text: str, port: int | None = None) -> str:
  """Checks one server in a URL.

  Args:
    url: the URL, for the error.
    text: the server, host:port.
    port: if the server has none; None if it must have one.

  Returns:
    The server, with its port.

  Raises:
    ValueError: it is no host and port.
  """
  has_port = port is None or text.rpartition(":")[2].isdecimal()
  try:
    (found,) = addresses.parse(text if has_port else f"{text}:{port}")
  except ValueError:
    found = addresses.Endpoint()
  if not found.host:
    raise wrong(url, f"{text!r} is no host and port")
  return str(found)


def wrong(url: str, why: str) -> ValueError:
  """The error of a URL, without its password."""
  shown = url.rpartition("@")[2]
  return ValueError(
    "A store is tcp://host:port or"
    f" etcd://host:2379,host:2379,host:2379; got {shown!r}: {why}."
  )
