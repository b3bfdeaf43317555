"""The store on an etcd cluster, which survives the loss of any of its servers.

It uses etcd's JSON gateway and only the standard library, since the maintained
Python clients know one server each. A thread executes the requests in order. It
tries each at one server after another until the request times out; all can be
repeated safely.

Another process with access to the cluster could write keys of a run. So values
are signed with the job's secret: a value that no member wrote ends the run.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import hmac
import http.client
import json
import logging
import queue
import random
import socket
import ssl
import threading
import time
from typing import Any, NoReturn

from optax_dist.coordinator.store import interface
from optax_dist.coordinator.transport import addresses, sockets

_log = logging.getLogger("optax_dist.coordinator")

# Shortest and longest time in seconds to wait for one server before asking the
# next one.
_ATTEMPT = 0.5, 2.0
_BACKOFF = 0.05, 0.3
_TAG = 32
# gRPC status codes.
_INVALID, _DENIED, _EXHAUSTED, _UNAUTHENTICATED = 3, 7, 8, 16


class _Failed(Exception):
  """An attempt got no answer; a retry may."""


class _Rejected(Exception):
  """The cluster refuses the request, and would refuse a retry."""


class _Forged(Exception):
  """The cluster holds something that this run did not write."""


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

  @property
  def host(self) -> str:
    """The host of the first server."""
    return addresses.parse(self.endpoints[0])[0].host

  def open(
    self, transport: sockets.Transport, secret: bytes
  ) -> interface.Store:
    """Creates a client of the cluster."""
    return EtcdStore(self, secret, transport.wake)


class EtcdStore(interface.Store):
  """A client of an etcd cluster; see `interface.Store`."""

  def __init__(
    self,
    place: Etcd,
    secret: bytes,
    wake: interface.Wake = lambda: None,
  ):
    """Starts to connect, in its own thread.

    Args:
      place: the cluster.
      secret: the job's secret.
      wake: called from any thread when there are events to poll.

    Raises:
      ValueError: the prefix is not valid in a key.
      OSError: a certificate can't be read.
    """
    interface.check_key(place.prefix)
    scheme = "etcds" if place.tls else "etcd"
    self.address = f"{scheme}://{','.join(place.endpoints)}"
    self._place, self._secret = place, secret
    self._folder = f"{place.prefix}/"
    self._wake = wake
    self._servers = _Servers(place)
    self._cluster, self._revision = "", 0
    self._closed = False
    # The thread drops a request that is no longer there.
    self._requests = interface.Requests(self.address)
    self._queue: queue.SimpleQueue[interface.Request | None] = (
      queue.SimpleQueue()
    )
    self._events: collections.deque[interface.Event] = collections.deque()
    # Why the last attempt got no answer.
    self._trouble = ""
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-etcd", daemon=True
    )
    self._thread.start()

  # Called by its owner.

  def ask(self, request: interface.Request, timeout: float) -> None:
    if not self._closed:
      self._requests.add(request, timeout)
      self._queue.put(request)

  def poll(self) -> list[interface.Event]:
    found: list[interface.Event] = []
    while self._events:
      event = self._events.popleft()
      if isinstance(event, interface.StoreLost):
        self._requests.clear()
        found.append(event)
      elif self._requests.remove(event.request):
        found.append(event)
    return found + self._requests.expired(self._trouble)

  def deadline(self) -> float | None:
    return self._requests.deadline()

  def close(self) -> None:
    self._closed = True
    self._requests.clear()
    self._queue.put(None)
    self._servers.interrupt()
    self._thread.join(5.0)

  # In its own thread.

  def _run(self) -> None:
    with contextlib.closing(self._servers):
      try:
        while (request := self._queue.get()) is not None:
          self._execute(request)
      except Exception as error:
        if not isinstance(error, _Rejected | _Forged):
          _log.exception("the client of %s failed", self.address)
        self._closed = True
        reason = str(error) or repr(error)
        self._events.append(interface.StoreLost(f"{self.address}: {reason}"))
        self._wake()

  def _execute(self, request: interface.Request) -> None:
    """Tries a request until it has an answer, or times out."""
    path, body = self._message(request)
    while request in self._requests:
      asked_at = self._revision
      try:
        found = self._servers.post(path, body)
        self._check_header(found["header"], asked_at)
        answer = self._read(request, found)
      except _Failed as error:
        self._trouble = str(error)
        self._servers.next()
        continue
      except _Rejected as error:
        answer = interface.Unknown(request.request, str(error))
      self._trouble = ""
      self._events.append(answer)
      self._wake()
      return

  def _message(self, request: interface.Request) -> tuple[str, dict[str, Any]]:
    match request:
      case interface.PutIfAbsent(_, key, value):
        at = self._key(key)
        put = {"key": at, "value": self._seal(key, value)}
        return "kv/txn", {
          "compare": [{"key": at, "target": "CREATE", "create_revision": "0"}],
          "success": [{"request_put": put}],
          "failure": [{"request_range": {"key": at}}],
        }
      case interface.Put(_, key, value):
        return "kv/put", {
          "key": self._key(key),
          "value": self._seal(key, value),
        }
      case interface.Get(_, key):
        return "kv/range", {"key": self._key(key)}
      case interface.Delete(_, keys):
        removed = [{"key": self._key(key)} for key in keys]
        return "kv/txn", {
          "success": [{"request_delete_range": one} for one in removed]
        }

  def _read(
    self, request: interface.Request, answer: dict[str, Any]
  ) -> interface.Answer:
    number = request.request
    match request:
      case interface.PutIfAbsent(_, key, value) if not answer.get("succeeded"):
        found = answer["responses"][0]["response_range"]["kvs"][0]
        other = self._open(key, found["value"])
        if other != value:
          return interface.Conflict(number, other)
      case interface.Get(_, key):
        pairs = answer.get("kvs")
        found = self._open(key, pairs[0]["value"]) if pairs else None
        return interface.Value(number, found)
    return interface.Done(number)

  # Keys and values.

  def _key(self, key: str) -> str:
    return _base64((self._folder + key).encode())

  def _tag(self, key: str, value: bytes) -> bytes:
    place = f"optax-dist store\0{self._folder}{key}\0".encode()
    return hmac.digest(self._secret, place + value, "sha256")

  def _seal(self, key: str, value: bytes) -> str:
    return _base64(self._tag(key, value) + value)

  def _open(self, key: str, text: str) -> bytes:
    raw = base64.b64decode(text)
    value = raw[_TAG:]
    if not hmac.compare_digest(raw[:_TAG], self._tag(key, value)):
      raise _Forged(
        f"{self._folder + key!r} has a value that no member of this run wrote:"
        " another secret, or somebody else writes to the cluster"
      )
    return value

  def _check_header(self, header: dict[str, Any], asked_at: int) -> None:
    """Raises `_Forged` unless it is still the same cluster."""
    revision = int(header.get("revision", 0))
    self._cluster = self._cluster or header["cluster_id"]
    if header["cluster_id"] != self._cluster or revision < asked_at:
      raise _Forged("the cluster was re-created, and its data is gone")
    self._revision = max(self._revision, revision)


class _Servers:
  """A connection to one of the servers, and then to the next one."""

  def __init__(self, place: Etcd):
    self._place = place
    self._ssl = _context(place) if place.tls else None
    self._endpoints = list(place.endpoints)
    # Spreads the clients over the servers.
    random.shuffle(self._endpoints)
    self._connection: http.client.HTTPConnection | None = None
    self._token = ""
    self._patience, self._backoff = _ATTEMPT[0], _BACKOFF[0]

  def next(self) -> None:
    """Switches to the next server, after a growing pause."""
    self.close()
    self._endpoints.append(self._endpoints.pop(0))
    time.sleep(self._backoff * random.uniform(0.5, 1.0))
    self._backoff = min(2 * self._backoff, _BACKOFF[1])
    self._patience = min(2 * self._patience, _ATTEMPT[1])

  def close(self) -> None:
    """Closes the connection, if there is one."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None

  def interrupt(self) -> None:
    """Ends what the thread waits for; any thread may call it."""
    connection = self._connection
    sock = None if connection is None else connection.sock
    if sock is not None:
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

  def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one request and returns its answer.

    Raises:
      _Failed: there is no answer, or none that says what came of it.
      _Rejected: the cluster refuses the request.
    """
    place = self._place
    if place.user and not self._token:
      login = {"name": place.user, "password": place.password}
      self._token = self._send("auth/authenticate", login)["token"]
    found = self._send(path, body)
    self._patience, self._backoff = _ATTEMPT[0], _BACKOFF[0]
    return found

  def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    server = self._endpoints[0]
    if self._connection is None:
      ((host, port, _),) = addresses.parse(server)
      self._connection = (
        http.client.HTTPConnection(host, port)
        if self._ssl is None
        else http.client.HTTPSConnection(host, port, context=self._ssl)
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
    except (OSError, http.client.HTTPException, ValueError) as error:
      text = "it does not answer" if isinstance(error, TimeoutError) else error
      raise _Failed(f"{server}: {text}") from error
    # In the body, etcd 3.5 and 3.6 say differently that it is an error.
    if answer.status != http.HTTPStatus.OK:
      self._raise_for(found)
    return found

  def _raise_for(self, found: dict[str, Any]) -> NoReturn:
    code = found.get("code", 0)
    text = f"{self._endpoints[0]}: {found.get('message', found)}"
    # One of JSON is of one revision of users and roles: "... is old".
    if self._token and (code == _UNAUTHENTICATED or text.endswith("is old")):
      self._token = ""
    elif code in (_INVALID, _DENIED) or (
      code == _EXHAUSTED and "space" in text
    ):
      raise _Rejected(text)
    raise _Failed(text)


def _context(place: Etcd) -> ssl.SSLContext:
  context = ssl.create_default_context(cafile=place.ca or None)
  if place.cert:
    context.load_cert_chain(place.cert, place.key)
  return context


def _base64(raw: bytes) -> str:
  return base64.b64encode(raw).decode()
