"""The key-value store interface: requests, answers, and the client protocol.

Requests return at once; nothing here ever waits. `Store.poll` returns what came
of them, as a list of events:

  store.ask(PutIfAbsent(7, "log/12", record), timeout=5.0)
  for event in store.poll():
    match event:
      case Done(request): ...
      case Conflict(request, value): ...
      case Unknown(request, reason): ...

Every request ends in exactly one `Answer`, at the latest when it times out. If
an answer was lost, for example with a broken connection, the store retries by
itself. So that a process doesn't conflict with its own earlier try, a
`PutIfAbsent` succeeds if the key already has exactly that value: values of
different writers must differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.transport import interface as transports

# The longest key, in characters, and the largest value, in bytes.
MAX_KEY = 200
MAX_VALUE = 1 << 20
# How many keys one `delete` may name; etcd allows no more in a transaction.
MAX_KEYS = 128


class PutIfAbsent(Struct):
  """Puts a value if the key has none: `Done` or `Conflict`.

  Attributes:
    request: its number.
    key: the key.
    value: at most `MAX_VALUE` bytes; no other writer puts the same.
  """

  request: int
  key: str
  value: bytes


class Put(Struct):
  """Puts a value whether or not there is one: `Done`.

  If its answer is lost it is put again, perhaps over a value that another
  writer has put in the meantime: use it for hints.
  """

  request: int
  key: str
  value: bytes


class Get(Struct):
  """Asks for the latest value: `Value`."""

  request: int
  key: str


class Delete(Struct):
  """Removes keys, whether or not they exist: `Done`.

  A removed key can be put again.

  Attributes:
    request: its number.
    keys: at most `MAX_KEYS`.
  """

  request: int
  keys: tuple[str, ...]


Request: TypeAlias = PutIfAbsent | Put | Get | Delete


class Done(Struct):
  """The request was executed durably."""

  request: int


class Conflict(Struct):
  """The key already has another value; nothing was changed.

  Attributes:
    request: the number of a `PutIfAbsent`.
    value: the key's value.
  """

  request: int
  value: bytes


class Value(Struct):
  """The key's value; None if it has none."""

  request: int
  value: bytes | None


class Unknown(Struct):
  """The request timed out, or the store refuses it, as when it is full.

  It may have been executed, and may even be executed later. Put the same value
  again, or get the key, to find out.

  Attributes:
    request: the number of any request.
    reason: the key, the store's address and the time waited, or why the store
      refuses it, for people.
  """

  request: int
  reason: str


class StoreLost(Struct):
  """The store can't be used any more; no other event follows.

  For example it was restarted without its keys, or has another secret. Being
  unreachable for a while does not count.

  Attributes:
    reason: explanation with the store's address, for people.
  """

  reason: str


Answer: TypeAlias = Done | Conflict | Value | Unknown
Event: TypeAlias = Answer | StoreLost


class Store:
  """A client of a key-value store.

  One thread owns it and makes all calls. Events of the owner's own transport
  are passed on by `handle`; a client with its own thread calls the `wake` it
  was created with, from that thread, whenever there are events to poll.

  Keys are paths such as ``log/17``, of letters, digits and ``_.-``. Requests
  take effect one after the other, in the order in which they were made.
  """

  def ask(self, request: Request, timeout: float) -> None:
    """Makes a request; ends in one `Answer`.

    Args:
      request: the request; no other request of this client has its number.
      timeout: seconds until it is `Unknown`.

    Raises:
      ValueError: a key is invalid, or a value is too large.
    """
    raise NotImplementedError

  def handle(self, event: transports.Event) -> bool:
    """Takes an event of the owner's transport; returns whether it is for it."""
    return False

  def deadline(self) -> float | None:
    """Seconds until the next poll is due; None: at the next event or wake."""
    return None

  def poll(self) -> list[Event]:
    """Returns the events since the last call; never waits."""
    raise NotImplementedError

  def close(self) -> None:
    """Closes it; open requests get no answer."""


Wake: TypeAlias = Callable[[], None]

_PLAIN = frozenset(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
)


def check_key(key: str) -> None:
  """Raises `ValueError` unless it is a valid key.

  Example:
    >>> check_key("log/17")
    >>> check_key("log//17")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: A key is a path such as log/17 ... got 'log//17'.
  """
  parts = key.split("/")
  if len(key) > MAX_KEY or not all(p and _PLAIN.issuperset(p) for p in parts):
    raise ValueError(
      f"A key is a path such as log/17 of letters, digits, '_', '.' and '-',"
      f" of at most {MAX_KEY} characters; got {key!r}."
    )


def check(request: Request) -> None:
  """Raises `ValueError` unless a store can execute the request."""
  match request:
    case Delete(_, keys):
      if len(keys) > MAX_KEYS:
        raise ValueError(
          f"At most {MAX_KEYS} keys can be deleted at a time, got {len(keys)}."
        )
      for key in keys:
        check_key(key)
    case _:
      check_key(request.key)
  if isinstance(request, PutIfAbsent | Put) and len(request.value) > MAX_VALUE:
    raise ValueError(
      f"The value for {request.key!r} has {len(request.value):,} bytes; a store"
      f" takes at most {MAX_VALUE:,}."
    )


class Requests:
  """The requests of a client that have no answer yet, in order.

  Only the client's owner changes them. Another thread may ask whether a request
  is still among them.

  Example:
    >>> requests = Requests("tcp://a:29300", now=iter([0.0, 5.0]).__next__)
    >>> requests.add(Get(7, "log/12"), timeout=5.0)
    >>> requests.expired("not connected")  # doctest: +NORMALIZE_WHITESPACE
    [Unknown(request=7, reason="get of 'log/12' at tcp://a:29300: no answer in
     5.0 s (not connected)")]
  """

  def __init__(self, address: str, now: Callable[[], float] = time.monotonic):
    """Starts without requests.

    Args:
      address: of the store, for messages.
      now: a clock, in seconds.
    """
    self._address, self._now = address, now
    self._pending: dict[int, _Pending] = {}

  def add(self, request: Request, timeout: float) -> None:
    """Adds a request; see `Store.ask`."""
    check(request)
    self._pending[request.request] = _Pending(request, self._now(), timeout)

  def __iter__(self) -> Iterator[Request]:
    return (pending.request for pending in self._pending.values())

  def __contains__(self, request: Request) -> bool:
    return request.request in self._pending

  def remove(self, number: int) -> bool:
    """Removes a request; returns whether it was there."""
    return self._pending.pop(number, None) is not None

  def clear(self) -> None:
    """Removes all requests."""
    self._pending.clear()

  def expired(self, why: str) -> list[Event]:
    """Removes the requests that have timed out; returns their answers.

    Args:
      why: why there is no answer, if it is known.
    """
    now = self._now()
    found: list[Event] = []
    for number, (request, began, timeout) in list(self._pending.items()):
      if now >= began + timeout:
        del self._pending[number]
        reason = (
          f"{_described(request)} at {self._address}: no answer in"
          f" {now - began:.1f} s"
        )
        found.append(Unknown(number, f"{reason} ({why})" if why else reason))
    return found

  def deadline(self) -> float | None:
    """Seconds until the next one times out; None if there is none."""
    ends = [began + timeout for _, began, timeout in self._pending.values()]
    return max(0.0, min(ends) - self._now()) if ends else None


class _Pending(NamedTuple):
  request: Request
  began: float
  timeout: float


def _described(request: Request) -> str:
  match request:
    case Delete(_, keys):
      more = ", ..." if len(keys) > 3 else ""
      return f"delete of {', '.join(map(repr, keys[:3]))}{more}"
    case Get(_, key):
      return f"get of {key!r}"
  return f"put of {request.key!r}"
