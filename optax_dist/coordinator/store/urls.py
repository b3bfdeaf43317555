"""Store URLs."""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import TypeAlias

_ETCD_PORT = 2379
_OPTIONS = ("ca", "cert", "key", "prefix")


@dataclasses.dataclass(frozen=True)
class InProcess:
  """The store of this process."""


@dataclasses.dataclass(frozen=True)
class Tcp:
  """A store process.

  Attributes:
    address: its address, as the transport writes it.
  """

  address: str


@dataclasses.dataclass(frozen=True)
class Etcd:
  """An etcd cluster.

  Attributes:
    endpoints: its servers, as host:port.
    user: user to log in as; "" for none.
    password: of the user.
    tls: whether connections are encrypted.
    ca: path of the certificates that sign the servers' ones; "" for the
      system's.
    cert: path of this client's certificate, if the servers ask for one.
    key: path of its key.
    prefix: prefix of all keys, so that the cluster can be shared.
  """

  endpoints: tuple[str, ...]
  user: str = ""
  password: str = dataclasses.field(default="", repr=False)
  tls: bool = False
  ca: str = ""
  cert: str = ""
  key: str = ""
  prefix: str = "optax-dist"


Place: TypeAlias = InProcess | Tcp | Etcd


def parse(url: str) -> Place:
  """Parses ``in-process``, ``tcp://host:port`` or ``etcd://a:2379,b:2379``.

  An ``etcd://`` URL may have ``user:password@`` before its servers, and options
  after them, as in ``etcds://a,b,c?ca=ca.pem&cert=me.pem&key=me.key``; with
  ``etcds://`` connections are encrypted.

  Raises:
    ValueError: it is not a store URL.

  Example:
    >>> parse("etcd://a,b:23790").endpoints
    ('a:2379', 'b:23790')
    >>> parse("tcp://[::1]:29300")
    Tcp(address='[::1]:29300')
  """
  if url == "in-process":
    return InProcess()
  scheme, mark, rest = url.partition("://")
  if not mark or scheme not in ("tcp", "etcd", "etcds"):
    raise _wrong(url, "it begins with none of these")
  where, _, query = rest.partition("?")
  where = where.removesuffix("/")
  login, at, servers = where.rpartition("@")
  endpoints = tuple(_endpoint(url, s, scheme) for s in servers.split(","))
  if scheme == "tcp":
    if at or query or len(endpoints) != 1:
      raise _wrong(url, "a store process is one host and port, and no more")
    return Tcp(endpoints[0])
  user, _, password = login.partition(":")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  unknown = [name for name in options if name not in _OPTIONS]
  if unknown or len(set(endpoints)) < len(endpoints):
    why = f"there is no option {unknown[0]!r}" if unknown else "a server twice"
    raise _wrong(url, why)
  tls = scheme == "etcds"
  if bool(options.get("cert")) != bool(options.get("key")):
    raise _wrong(url, "cert and key belong together")
  if not tls and any(options.get(name) for name in ("ca", "cert", "key")):
    raise _wrong(url, "certificates are for etcds://")
  unquote = urllib.parse.unquote
  return Etcd(endpoints, unquote(user), unquote(password), tls, **options)


def _endpoint(url: str, text: str, scheme: str) -> str:
  try:
    parts = urllib.parse.urlsplit(f"//{text}")
    host, port = parts.hostname, parts.port
  except ValueError as error:
    raise _wrong(url, str(error)) from None
  if not host or parts.path or (port is None and scheme == "tcp") or port == 0:
    raise _wrong(url, f"{text!r} is no host and port")
  shown = f"[{host}]" if ":" in host else host
  return f"{shown}:{_ETCD_PORT if port is None else port}"


def _wrong(url: str, why: str) -> ValueError:
  # Don't show a password.
  shown = url.rpartition("@")[2]
  return ValueError(
    "A store is in-process, tcp://host:port or"
    f" etcd://host:2379,host:2379,host:2379; got {shown!r}: {why}."
  )
