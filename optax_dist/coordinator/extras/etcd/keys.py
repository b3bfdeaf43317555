"""Where the keys of a run are in etcd, and how they are written."""

from __future__ import annotations

import base64
import dataclasses
import hmac
import urllib.parse
from typing import Any

from optax_dist.coordinator.transport import addresses

_PORT = 2379
_PREFIX = "optax-dist"
_OPTIONS = ("ca", "cert", "key", "prefix", "lease")
_PLAIN = frozenset(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._"
)
_TAG = 32


class Foreign(RuntimeError):
  """The cluster holds something that no process of this job wrote."""


@dataclasses.dataclass(frozen=True)
class Etcd:
  """The keys of a run in an etcd cluster.

  Attributes:
    endpoints: the servers, as host:port.
    user: user to log in as; "" for none.
    password: the user's password.
    tls: whether connections are encrypted.
    ca: path of the certificates that sign the servers' ones; "" for the
      system's.
    cert: path of this client's certificate, if the servers ask for one.
    key: path of its key.
    prefix: the prefix of all keys, by which jobs share a cluster, like the ports of a
      host.
    lease: seconds after which another coordinator takes over from one that is
      gone.
  """

  endpoints: tuple[str, ...]
  user: str = ""
  password: str = dataclasses.field(default="", repr=False)
  tls: bool = False
  ca: str = ""
  cert: str = ""
  key: str = ""
  prefix: str = _PREFIX
  lease: float = 5.0

  def __str__(self) -> str:
    """Its URL, without a password."""
    scheme = "etcds" if self.tls else "etcd"
    shown = f"{scheme}://{','.join(self.endpoints)}"
    return shown if self.prefix == _PREFIX else f"{shown}?prefix={self.prefix}"

  @property
  def host(self) -> str:
    """The host of the first server."""
    return addresses.endpoint(self.endpoints[0]).host

  @property
  def holder_key(self) -> str:
    """The key that names the lease's holder."""
    return f"{self.prefix}/coordinator"

  def log_prefix(self, run: str) -> str:
    """The beginning of the keys of a run's log."""
    return f"{self.prefix}/log/{urllib.parse.quote(run, safe='')}/"


def parse(url: str) -> Etcd:
  """Parses the URL of a cluster.

  It may have ``user:password@`` before its servers, and options after them, as
  in ``etcds://a,b,c?ca=ca.pem&cert=me.pem&key=me.key``; with ``etcds://``
  connections are encrypted.

  Raises:
    ValueError: it is not one.

  Example:
    >>> parse("etcd://a,b:23790").endpoints
    ('a:2379', 'b:23790')
  """
  scheme, _, rest = url.partition("://")
  where, _, query = rest.partition("?")
  if "@" in query:
    # The rest may be of a password, too.
    raise _wrong(url, "? is written %3F in a password, and @ %40 in an option")
  login, _, servers = where.removesuffix("/").rpartition("@")
  endpoints = tuple(_endpoint(url, s) for s in servers.split(","))
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
  prefix = options.pop("prefix", _PREFIX)
  if not all(p and _PLAIN.issuperset(p) for p in prefix.split("/")):
    raise _wrong(url, f"the prefix {prefix!r} is no path such as team/run-7")
  try:
    lease = float(options.pop("lease", "5"))
  except ValueError:
    lease = 0.0
  if not 2.0 <= lease <= 3600.0:
    raise _wrong(url, "lease is seconds, at least 2")
  user, _, password = map(urllib.parse.unquote, login.partition(":"))
  return Etcd(
    endpoints, user, password, tls, prefix=prefix, lease=lease, **options
  )


def below(url: str, name: str) -> str:
  """The URL of keys below those of another one.

  Example:
    >>> below("etcd://me:word@a,b?prefix=team", "run-7")
    'etcd://me:word@a,b?prefix=team%2Frun-7'
    >>> below("etcd://a", "run-7")
    'etcd://a?prefix=optax-dist%2Frun-7'
  """
  where, _, query = url.partition("?")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  plain = "".join(c if c in _PLAIN else "_" for c in name)
  options["prefix"] = f"{options.get('prefix', _PREFIX)}/{plain}"
  return f"{where}?{urllib.parse.urlencode(options)}"


def _endpoint(url: str, text: str) -> str:
  """Checks one server in a URL; returns it with its port."""
  has_port = text.rpartition(":")[2].isdecimal()
  try:
    way = addresses.endpoint(text if has_port else f"{text}:{_PORT}")
    # Fails, as a look-up would, if a label of the name is empty or too long.
    way.host.encode("idna")
    return str(way)
  except ValueError:
    raise _wrong(url, f"{text!r} is no host and port") from None


def _wrong(url: str, why: str) -> ValueError:
  """The error of an invalid URL; its text leaves out whatever may be the password."""
  shown = url.rpartition("@")[2].partition("?")[0]
  return ValueError(
    "Coordinators in etcd are found at etcd://host:2379,host:2379,host:2379; got"
    f" {shown!r}: {why}."
  )


def encoded(key: str | bytes) -> str:
  """A key or value, as etcd's gateway takes it."""
  raw = key.encode() if isinstance(key, str) else key
  return base64.b64encode(raw).decode()


def decoded(text: str) -> bytes:
  """A key or value of etcd's gateway."""
  return base64.b64decode(text)


def sealed(secret: bytes, key: str, value: bytes) -> dict[str, str]:
  """A key and a value with its signature, as etcd's gateway takes them."""
  return {
    "key": encoded(key),
    "value": encoded(_tag(secret, key, value) + value),
  }


def unseal(secret: bytes, key: str, pair: dict[str, Any]) -> bytes:
  """The value of a key.

  Args:
    secret: the job's.
    key: the key.
    pair: key and value, as etcd returns them: without an empty value.

  Raises:
    Foreign: no process of this job wrote it.
  """
  raw = decoded(pair.get("value", ""))
  value = raw[_TAG:]
  if not hmac.compare_digest(raw[:_TAG], _tag(secret, key, value)):
    raise Foreign(
      f"etcd's key {key!r} has a value that no process of this job wrote: another"
      " job has these keys (give each a ?prefix= of its own), its secret is"
      " another one, or somebody else writes to the cluster"
    )
  return value


def _tag(secret: bytes, key: str, value: bytes) -> bytes:
  return hmac.digest(secret, f"optax-dist\0{key}\0".encode() + value, "sha256")
