"""URLs of etcd clusters."""

from __future__ import annotations

import urllib.parse

from optax_dist.coordinator.extras.etcd.client import Etcd
from optax_dist.coordinator.store import urls

_PORT = 2379
_OPTIONS = ("ca", "cert", "key", "prefix")


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
  login, _, servers = where.removesuffix("/").rpartition("@")
  endpoints = tuple(urls.endpoint(url, s, _PORT) for s in servers.split(","))
  user, _, password = login.partition(":")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  unknown = [name for name in options if name not in _OPTIONS]
  if unknown or len(set(endpoints)) < len(endpoints):
    why = f"there is no option {unknown[0]!r}" if unknown else "a server twice"
    raise urls.wrong(url, why)
  tls = scheme == "etcds"
  if bool(options.get("cert")) != bool(options.get("key")):
    raise urls.wrong(url, "cert and key belong together")
  if not tls and any(options.get(name) for name in ("ca", "cert", "key")):
    raise urls.wrong(url, "certificates are for etcds://")
  unquote = urllib.parse.unquote
  return Etcd(endpoints, unquote(user), unquote(password), tls, **options)
