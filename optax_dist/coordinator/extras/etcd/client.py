"""A client of an etcd cluster, which works while most of the servers are alive.

It uses etcd's JSON gateway and only the standard library, since the maintained
Python clients know one server each. A request is tried at one server after another
until there is an answer, so callers make only requests that can be repeated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
import time
from typing import Any, NoReturn

from optax_dist.coordinator.extras.etcd import keys
from optax_dist.coordinator.extras.etcd.keys import Etcd
from optax_dist.coordinator.transport import addresses, tls

# Seconds to wait for one server before asking the next one, and between two.
_ANSWER_SECONDS, _RETRY_SECONDS = 1.0, 0.1
# gRPC status codes.
_INVALID, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 3, 7, 8, 9, 16
_ERRORS = range(1, 17)
# HTTP status codes of a proxy that does not reach its server.
_PROXY = 502, 503, 504


class NoAnswer(Exception):
  """No server has answered: whether the request was carried out is unknown."""


class Rejected(OSError):
  """The cluster refuses the request, and would refuse another try."""

  def __init__(self, text: str):
    super().__init__(f"etcd refuses a request: {text}")


class _Failed(Exception):
  """An attempt got no answer; another one may, unless it is `final`."""

  def __init__(self, text: str, final: bool = False):
    super().__init__(text)
    self.final = final


class Client:
  """Asks one server at a time, and then the next one; a context manager."""

  def __init__(self, where: Etcd):
    """Connects with the first request.

    Raises:
      ValueError: a certificate can't be used.
    """
    self._where = where
    self._ssl: tls.Fresh[ssl.SSLContext] | None = None
    if where.tls:
      files = where.ca, where.cert, where.key
      self._ssl = tls.Fresh(files, lambda: _context(where))
    self._answered = False
    self._endpoints = list(where.endpoints)
    # Spreads the clients over the servers.
    random.shuffle(self._endpoints)
    self._connection: http.client.HTTPConnection | None = None
    self._token = ""

  def ask(
    self, path: str, body: dict[str, Any], seconds: float
  ) -> dict[str, Any]:
    """Makes one request; waits for its answer.

    Args:
      path: the path below ``/v3/``.
      body: the body of the request.
      seconds: how long to try; the request is tried once in any case.

    Raises:
      NoAnswer: there is no answer in this time.
      Rejected: the cluster refuses the request.
    """
    until, refusals = time.monotonic() + seconds, 0
    while True:
      try:
        answer = self._attempt(path, body)
      except _Failed as error:
        self.close()
        self._endpoints.append(self._endpoints.pop(0))
        refusals = refusals + 1 if error.final else 0
        if refusals >= len(self._endpoints) and not self._answered:
          raise Rejected(str(error)) from None
        if time.monotonic() >= until:
          raise NoAnswer(f"no answer of etcd: {error}") from None
        time.sleep(_RETRY_SECONDS * random.uniform(0.5, 1.0))
      else:
        self._answered = True
        return answer

  def get(self, key: str, seconds: float) -> dict[str, Any] | None:
    """A key with its value, as etcd returns them; None if there is none.

    Raises:
      NoAnswer, Rejected: see `ask`.
    """
    answer = self.ask("kv/range", {"key": keys.encoded(key)}, seconds)
    return next(iter(answer.get("kvs", ())), None)

  def close(self) -> None:
    """Closes the connection, if there is one."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _attempt(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    where = self._where
    if where.user and not self._token:
      login = {"name": where.user, "password": where.password}
      self._token = self._send("auth/authenticate", login)["token"]
    return self._send(path, body)

  def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    server = self._endpoints[0]
    if self._connection is None:
      host, port, _ = addresses.endpoint(server)
      self._connection = (
        http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
        if self._ssl is None
        else http.client.HTTPSConnection(
          host, port, timeout=_ANSWER_SECONDS, context=self._ssl.get()
        )
      )
    headers = {"Content-Type": "application/json"}
    if self._token:
      headers["Authorization"] = self._token
    try:
      data = json.dumps(body).encode()
      self._connection.request("POST", f"/v3/{path}", data, headers)
      response = self._connection.getresponse()
      raw = response.read()
    except ssl.SSLError as error:
      text = f"{server}: {self._explain(error)}"
      raise _Failed(text, tls.is_final(error)) from error
    except (OSError, http.client.HTTPException) as error:
      silent = isinstance(error, TimeoutError)
      text = "it does not answer" if silent else f"{error}"
      if isinstance(error, http.client.RemoteDisconnected) and not self._ssl:
        text += " (if it has certificates, its URL begins with etcds://)"
      raise _Failed(f"{server}: {text}") from error
    answer = _parsed(raw)
    if answer is None:
      # A proxy before etcd may find it again.
      final = response.status not in _PROXY
      text = f"what answers there is no etcd (HTTP status {response.status})"
      raise _Failed(f"{server}: {text}", final)
    # The status is checked, since the bodies of errors differ between etcd 3.5 and 3.6.
    if response.status != http.HTTPStatus.OK:
      self._raise_for(answer)
    return answer

  def _explain(self, error: ssl.SSLError) -> str:
    where = self._where
    if not where.cert and "_ALERT_" in f"{error.reason}":
      return "it asks for a certificate: give ?cert= and key="
    files = tls.Certificates(where.cert, where.key, where.ca)
    return tls.explain(error, files, True)

  def _raise_for(self, answer: dict[str, Any]) -> NoReturn:
    code = _code(answer)
    text = f"{self._endpoints[0]}: {answer.get('message', answer)}"
    # A token is void after a change of users or roles; the error ends with "is old".
    if self._token and (code == _UNAUTHENTICATED or text.endswith("is old")):
      self._token = ""
    elif code in (_INVALID, _DENIED) or (
      code == _EXHAUSTED and "space" in text
    ):
      raise Rejected(text)
    raise _Failed(text, code == _PRECONDITION)


def _parsed(text: bytes) -> dict[str, Any] | None:
  """An answer of etcd: it has a header or an error's code; None if it is none."""
  with contextlib.suppress(ValueError, RecursionError):
    answer = json.loads(text)
    if isinstance(answer, dict):
      # In a stream, such as that of a lease, the answer is one level below.
      inner = answer.get("result", answer.get("error"))
      answer = inner if isinstance(inner, dict) else answer
      if "header" in answer or _code(answer) in _ERRORS:
        return answer
  return None


def _code(answer: dict[str, Any]) -> Any:
  return answer.get("code", answer.get("grpc_code"))


def _context(where: Etcd) -> ssl.SSLContext:
  if where.ca:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  else:
    context = ssl.create_default_context()
  tls.load(context, where.cert, where.key, where.ca)
  return context
