"""A client of an etcd cluster, which goes on while most of its servers live.

It uses etcd's JSON gateway and only the standard library, since the maintained
Python clients know one server each. A request is tried at one server after another
until there is an answer; whoever asks makes sure that it can be repeated.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import ssl
import time
from typing import Any, NoReturn

from optax_dist.coordinator.transport import addresses, tls

# Shortest and longest time in seconds to wait for one server before asking the
# next one.
_TRANSFER = 0.5, 2.0
_BACKOFF = 0.05, 0.3
# gRPC status codes.
_INVALID, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 3, 7, 8, 9, 16


class NoAnswer(Exception):
  """No server has answered: whether the request was carried out is unknown."""


class Rejected(Exception):
  """The cluster refuses the request, and would refuse another try."""


class _Failed(Exception):
  """An attempt got no answer; another one may, unless it is `final`."""

  def __init__(self, text: str, final: bool = False):
    super().__init__(text)
    self.final = final


@dataclasses.dataclass(frozen=True)
class Servers:
  """The servers of a cluster, and who logs in.

  Attributes:
    endpoints: its servers, as host:port.
    user: user to log in as; "" for none.
    password: of the user.
    tls: whether connections are encrypted.
    ca: path of the certificates that sign the servers' ones; "" for the
      system's.
    cert: path of this client's certificate, if the servers ask for one.
    key: path of its key.
  """

  endpoints: tuple[str, ...]
  user: str = ""
  password: str = dataclasses.field(default="", repr=False)
  tls: bool = False
  ca: str = ""
  cert: str = ""
  key: str = ""


class Client:
  """Asks one server at a time, and then the next one; a context manager."""

  def __init__(self, servers: Servers):
    """Connects with the first request.

    Raises:
      ValueError: a certificate can't be used.
    """
    self._servers = servers
    self._ssl: tls.Fresh[ssl.SSLContext] | None = None
    if servers.tls:
      files = servers.ca, servers.cert, servers.key
      self._ssl = tls.Fresh(files, lambda: _context(servers))
    # Whether there was an answer, and how many servers in a row never will.
    self._answered, self._final = False, 0
    self._endpoints = list(servers.endpoints)
    # Spreads the clients over the servers.
    random.shuffle(self._endpoints)
    self._connection: http.client.HTTPConnection | None = None
    self._token = ""
    self._patience, self._backoff = _TRANSFER[0], _BACKOFF[0]

  def ask(
    self, path: str, body: dict[str, Any], until: float
  ) -> dict[str, Any]:
    """Makes one request; waits for its answer.

    Args:
      path: below ``/v3/``.
      body: of the request.
      until: when to give up; by `time.monotonic`. It is tried once in any case.

    Raises:
      NoAnswer: there is none until then.
      Rejected: the cluster refuses the request.
    """
    while True:
      try:
        found = self._attempt(path, body)
      except _Failed as error:
        self._next()
        self._final = self._final + 1 if error.final else 0
        if self._final >= len(self._endpoints) and not self._answered:
          raise Rejected(str(error)) from None
        if time.monotonic() >= until:
          raise NoAnswer(f"no answer of etcd: {error}") from None
        continue
      self._patience, self._backoff = _TRANSFER[0], _BACKOFF[0]
      self._answered, self._final = True, 0
      return found

  def close(self) -> None:
    """Closes the connection, if there is one."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _next(self) -> None:
    """Switches to the next server, after a growing pause."""
    self.close()
    self._endpoints.append(self._endpoints.pop(0))
    time.sleep(self._backoff * random.uniform(0.5, 1.0))
    self._backoff = min(2 * self._backoff, _BACKOFF[1])
    self._patience = min(2 * self._patience, _TRANSFER[1])

  def _attempt(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    servers = self._servers
    if servers.user and not self._token:
      login = {"name": servers.user, "password": servers.password}
      self._token = self._send("auth/authenticate", login)["token"]
    return self._send(path, body)

  def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    server = self._endpoints[0]
    if self._connection is None:
      ((host, port, _),) = addresses.parse(server)
      self._connection = (
        http.client.HTTPConnection(host, port)
        if self._ssl is None
        else http.client.HTTPSConnection(host, port, context=self._ssl.get())
      )
    self._connection.timeout = self._patience
    if self._connection.sock is not None:
      self._connection.sock.settimeout(self._patience)
    headers = {"Content-Type": "application/json"}
    if self._token:
      headers["Authorization"] = self._token
    try:
      data = json.dumps(body).encode()
      self._connection.request("POST", f"/v3/{path}", data, headers)
      answer = self._connection.getresponse()
      found: dict[str, Any] = json.loads(answer.read())
    except ssl.SSLError as error:
      text = f"{server}: {self._explain(error)}"
      raise _Failed(text, tls.is_final(error)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
      silent = isinstance(error, TimeoutError)
      text = "it does not answer" if silent else f"{error}"
      if isinstance(error, http.client.RemoteDisconnected) and not self._ssl:
        text += " (if it has certificates, its URL begins with etcds://)"
      raise _Failed(f"{server}: {text}") from error
    # In the body, etcd 3.5 and 3.6 say differently that it is an error.
    if answer.status != http.HTTPStatus.OK:
      self._raise_for(found)
    return found

  def _explain(self, error: ssl.SSLError) -> str:
    servers = self._servers
    if not servers.cert and "_ALERT_" in f"{error.reason}":
      return "it asks for a certificate: give ?cert= and key="
    files = tls.Certificates(servers.cert, servers.key, servers.ca)
    return tls.explain(error, files, True)

  def _raise_for(self, found: dict[str, Any]) -> NoReturn:
    # Of a stream, such as that of a lease, the error is one level below.
    inner = found.get("error")
    found = inner if isinstance(inner, dict) else found
    code = found.get("code", found.get("grpc_code", 0))
    text = f"{self._endpoints[0]}: {found.get('message', found)}"
    # One of JSON is of one revision of users and roles: "... is old".
    if self._token and (code == _UNAUTHENTICATED or text.endswith("is old")):
      self._token = ""
    elif code in (_INVALID, _DENIED) or (
      code == _EXHAUSTED and "space" in text
    ):
      raise Rejected(text)
    raise _Failed(text, code == _PRECONDITION)


def _context(servers: Servers) -> ssl.SSLContext:
  if servers.ca:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  else:
    context = ssl.create_default_context()
  tls.load(context, servers.cert, servers.key, servers.ca)
  return context
