"""The store on an etcd cluster, which survives the loss of any of its servers.

It uses etcd's JSON gateway and only the standard library, since the maintained
Python clients know one server each. Each request is tried at one server after
another until it times out; all can be repeated safely.

Another process with access to the cluster could write keys of a run. So values
are signed with the job's secret: a value that no member wrote ends the run.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import hmac
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from optax_dist.coordinator.store import interface, urls
from optax_dist.coordinator.transport import interface as transports

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


@dataclasses.dataclass
class _Pending:
  request: interface.Request
  began: float
  timer: asyncio.TimerHandle | None = None
  detail: str = ""


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
    return urls.host(self.endpoints[0])

  def open(
    self, transport: transports.Transport, secret: bytes
  ) -> interface.Store:
    """Creates a client of the cluster."""
    return EtcdStore(self, secret, "runs", transport.wake)


class EtcdStore:
  """A client of an etcd cluster; see `interface.Store`."""

  def __init__(
    self,
    place: Etcd,
    secret: bytes,
    run: str,
    wake: interface.Wake = lambda: None,
  ):
    """Starts to connect, in its own thread.

    Args:
      place: the cluster.
      secret: the job's secret.
      run: a name of the run, to keep its keys apart from those of others.
      wake: called from any thread when there are events to poll.

    Raises:
      ValueError: the name or the prefix is not valid in a key.
      OSError: a certificate can't be read.
    """
    interface.check_key(place.prefix)
    interface.check_key(run)
    scheme = "etcds" if place.tls else "etcd"
    self.address = f"{scheme}://{','.join(place.endpoints)}"
    self._place, self._secret = place, secret
    self._folder = f"{place.prefix}/{run}/"
    self._wake = wake
    self._events: collections.deque[interface.Event] = collections.deque()
    self._ssl = _context(place) if place.tls else None
    self._token = ""
    self._cluster, self._revision = "", 0
    self._pending: dict[int, _Pending] = {}
    self._loop = asyncio.new_event_loop()
    self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
    self._closed, self._ended = False, asyncio.Event()
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-etcd", daemon=True
    )
    self._thread.start()

  # Called by its owner.

  def ask(self, request: interface.Request, timeout: float) -> None:
    interface.check(request)
    pending = _Pending(request, time.monotonic())

    def begin() -> None:
      self._pending[request.request] = pending
      self._queue.put_nowait(pending)
      left = pending.began + timeout - time.monotonic()
      pending.timer = self._loop.call_later(left, self._expire, pending)

    self._call(begin)

  def poll(self) -> list[interface.Event]:
    found = []
    while self._events:
      found.append(self._events.popleft())
    return found

  def handle(self, event: transports.Event) -> bool:
    return False

  def deadline(self) -> float | None:
    return None

  def close(self) -> None:
    self._call(self._ended.set)
    self._closed = True
    self._thread.join(5.0)

  # In its own thread.

  def _run(self) -> None:
    with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
      runner.run(self._main())

  async def _main(self) -> None:
    work = self._loop.create_task(self._safely(self._work()))
    await self._ended.wait()
    work.cancel()
    await asyncio.wait([work])
    await asyncio.sleep(0)  # Closing a connection takes one more iteration.

  def _call(self, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # The loop was closed a moment ago.
      if not self._closed:
        self._loop.call_soon_threadsafe(function)

  def _expire(self, pending: _Pending) -> None:
    waited = time.monotonic() - pending.began
    what = interface.describe(pending.request)
    reason = f"{what} at {self.address}: no answer in {waited:.1f} s"
    number = pending.request.request
    self._answer(pending, interface.Unknown(number, reason + pending.detail))

  def _answer(self, pending: _Pending, answer: interface.Answer) -> None:
    if self._pending.get(answer.request) is pending:
      del self._pending[answer.request]
      if pending.timer is not None:
        pending.timer.cancel()
      self._tell(answer)

  def _lose(self, reason: str) -> None:
    self._closed = True
    self._tell(interface.StoreLost(f"{self.address}: {reason}"))
    self._ended.set()

  def _tell(self, event: interface.Event) -> None:
    self._events.append(event)
    self._wake()

  async def _safely(self, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work, and reports the error that ends it."""
    try:
      await work
    except Exception as error:
      if not isinstance(error, _Rejected | _Forged):
        _log.exception("the client of %s failed", self.address)
      self._lose(str(error) or repr(error))

  async def _work(self) -> None:
    """Executes requests one after the other."""
    with contextlib.closing(_Servers(self)) as servers:
      while True:
        pending = await self._queue.get()
        request = pending.request
        path, body = self._message(request)
        while self._pending.get(request.request) is pending:
          try:
            found = await servers.post(path, body)
            self._answer(pending, self._read(request, found))
          except _Failed as error:
            pending.detail = f" ({error})"
            await servers.next()
          except _Rejected as error:
            refused = interface.Refused(request.request, str(error))
            self._answer(pending, refused)

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
        if not pairs:
          return interface.Absent(number)
        return interface.Value(number, self._open(key, pairs[0]["value"]))
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

  def check_header(self, header: dict[str, Any], asked_at: int) -> None:
    """Raises `_Forged` unless it is still the same cluster."""
    revision = int(header.get("revision", 0))
    self._cluster = self._cluster or header["cluster_id"]
    if header["cluster_id"] != self._cluster or revision < asked_at:
      raise _Forged("the cluster was re-created, and its data is gone")
    self._revision = max(self._revision, revision)


class _Forged(Exception):
  """The cluster holds something that this run did not write."""


class _Servers:
  """A connection to one of the servers, and then to the next one."""

  def __init__(self, store: EtcdStore):
    self._store = store
    self._endpoints = list(store._place.endpoints)
    # Spreads the clients over the servers.
    random.shuffle(self._endpoints)
    self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None
    self._streams = None
    self._patience, self._backoff = _ATTEMPT[0], _BACKOFF[0]

  async def next(self) -> None:
    """Switches to the next server, after a growing pause."""
    self.close()
    self._endpoints.append(self._endpoints.pop(0))
    await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))
    self._backoff = min(2 * self._backoff, _BACKOFF[1])
    self._patience = min(2 * self._patience, _ATTEMPT[1])

  def close(self) -> None:
    """Closes the connection, if there is one."""
    if self._streams is not None:
      self._streams[1].transport.abort()
      self._streams = None

  @contextlib.asynccontextmanager
  async def _attempt(self) -> AsyncIterator[None]:
    """Raises connection errors inside the block as `_Failed`."""
    try:
      async with asyncio.timeout(self._patience):
        yield
    except (OSError, EOFError, ValueError, LookupError) as error:
      self.close()
      text = "it does not answer" if isinstance(error, TimeoutError) else error
      raise _Failed(f"{self._endpoints[0]}: {text}") from error

  async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one request and returns its answer."""
    asked_at = self._store._revision
    async with self._attempt():
      await self._log_in()
      found = json.loads(await self._send(path, body))
      self._raise_for(found)
      self._store.check_header(found["header"], asked_at)
    self._patience, self._backoff = _ATTEMPT[0], _BACKOFF[0]
    return found

  async def _log_in(self) -> None:
    place = self._store._place
    if place.user and not self._store._token:
      body = {"name": place.user, "password": place.password}
      found = json.loads(await self._send("auth/authenticate", body))
      self._raise_for(found)
      self._store._token = found["token"]

  def _raise_for(self, found: dict[str, Any]) -> None:
    error = found.get("error")
    if error is None:
      return
    code = found.get("code", 0)
    text = f"{self._endpoints[0]}: {found.get('message', error)}"
    if code == _UNAUTHENTICATED and self._store._token:
      self._store._token = ""  # It has expired.
    elif code in (_INVALID, _DENIED) or (
      code == _EXHAUSTED and "space" in text
    ):
      raise _Rejected(text)
    raise _Failed(text)

  async def _send(self, path: str, body: dict[str, Any]) -> bytes:
    """Sends a request; returns its answer."""
    if self._streams is None:
      host, _, port = self._endpoints[0].rpartition(":")
      self._streams = await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=self._store._ssl
      )
    reader, writer = self._streams
    data = json.dumps(body).encode()
    token = self._store._token
    head = [
      f"POST /v3/{path} HTTP/1.1",
      f"Host: {self._endpoints[0]}",
      "Content-Type: application/json",
      f"Content-Length: {len(data)}",
      *([f"Authorization: {token}"] if token else ()),
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + data)
    await writer.drain()
    if not (await reader.readline()).startswith(b"HTTP/1."):
      raise EOFError("the connection was closed")
    headers = {}
    while line := (await reader.readline()).strip():
      name, _, text = line.partition(b":")
      headers[name.lower()] = text.strip().lower()
    return await _body(reader, headers)


async def _body(
  reader: asyncio.StreamReader, headers: dict[bytes, bytes]
) -> bytes:
  if headers.get(b"transfer-encoding") != b"chunked":
    return await reader.readexactly(int(headers[b"content-length"]))
  body = b""
  while size := int((await reader.readline()).partition(b";")[0], 16):
    body += await reader.readexactly(size)
    await reader.readline()
  while (await reader.readline()).strip():
    pass
  return body


def _context(place: Etcd) -> ssl.SSLContext:
  context = ssl.create_default_context(cafile=place.ca or None)
  if place.cert:
    context.load_cert_chain(place.cert, place.key)
  return context


def _base64(raw: bytes) -> str:
  return base64.b64encode(raw).decode()
