"""What the coordinator asks of a key-value store, and how the store answers.

Requests return at once; nothing here ever waits. What comes of them is returned by
`Store.poll`, as a list of events:

  store.ask(PutIfAbsent(7, "log/12", record), timeout=5.0)
  for event in store.poll():
    match event:
      case Done(request): ...
      case Conflict(request, value): ...
      case Unknown(request, reason): ...

Every request ends in exactly one `Answer`, at the latest when its timeout is
over. Where an answer was lost, for instance with a connection that was cut, the
store asks again by itself. So that a process is not beaten by its own earlier
try, a `PutIfAbsent` is done where the key has exactly that value already:
values of different writers must differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeAlias

from optax_dist.coordinator.transport import interface as transports

# The longest key, in characters, and the largest value, in bytes.
MAX_KEY = 200
MAX_VALUE = 1 << 20
# How many keys one `delete` may name; etcd takes no more in a transaction.
MAX_KEYS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class PutIfAbsent:
  """Puts a value where none is: `Done` or `Conflict`.

  Attributes:
    request: its number.
    key: where.
    value: at most `MAX_VALUE` bytes; no other writer puts the same.
  """

  request: int
  key: str
  value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
  """Puts a value whether there is one or not: `Done`.

  If its answer is lost it is put again, perhaps over what another one has put
  in the meantime: it is for hints.
  """

  request: int
  key: str
  value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
  """Asks for the latest value: `Value` or `Absent`."""

  request: int
  key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
  """Removes keys, whether they are there or not: `Done`.

  A removed key can be put again.

  Attributes:
    request: its number.
    keys: at most `MAX_KEYS`.
  """

  request: int
  keys: tuple[str, ...]


Request: TypeAlias = PutIfAbsent | Put | Get | Delete


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
  """What was asked for has happened, and lasts."""

  request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
  """The key has another value already; nothing was changed.

  Attributes:
    request: the number of a `PutIfAbsent`.
    value: the key's value.
  """

  request: int
  value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
  """The key's value."""

  request: int
  value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Absent:
  """The key has no value."""

  request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
  """The timeout is over, and no answer has come.

  What was asked for may have happened, and may even happen later. Put the same
  value again, or get the key, to find out.

  Attributes:
    request: whatever it was.
    reason: the key, the store's address and the time waited, for people.
  """

  request: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
  """The store will not do it, and has not: its quota is used up, for instance.

  Attributes:
    request: whatever it was.
    reason: in words, for people.
  """

  request: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StoreLost:
  """The store is of no use any more; no other event follows.

  It was started anew without its keys, for instance, or knows another secret.
  That it can't be reached for a while is no such loss.

  Attributes:
    reason: in words, with the store's address, for people.
  """

  reason: str


Answer: TypeAlias = Done | Conflict | Value | Absent | Unknown | Refused
Event: TypeAlias = Answer | StoreLost


class Store(Protocol):
  """A client of a key-value store.

  One thread owns it and calls everything. What comes over the owner's own
  transport is passed on by `handle`; a client with a thread of its own calls
  the `wake` that it was made with, from that thread, whenever there is
  something to poll.

  Keys are paths such as ``log/17``, of letters, digits and ``_.-``. Requests take
  effect one after the other, in the order in which they were made.

  Attributes:
    address: for people; without passwords.
  """

  address: str

  def ask(self, request: Request, timeout: float) -> None:
    """Asks for something; ends in one `Answer`.

    Args:
      request: what; its number is that of no request without an answer.
      timeout: seconds until it is `Unknown`.

    Raises:
      ValueError: a key is no key, or a value is too large.
    """
    ...

  def handle(self, event: transports.Event) -> bool:
    """Takes an event of its owner's transport; whether it was meant here."""
    ...

  def deadline(self) -> float | None:
    """In how many seconds to poll; None: when there is an event, or a wake."""
    ...

  def poll(self) -> list[Event]:
    """What has happened since it was last called; never waits."""
    ...

  def close(self) -> None:
    """Ends it; requests without an answer get none."""
    ...


Wake: TypeAlias = Callable[[], None]

_PLAIN = frozenset(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
)


def check_key(key: str) -> None:
  """Raises `ValueError` unless it is a key.

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
  """Raises `ValueError` unless it is a request that a store can carry out."""
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


def describe(request: Request) -> str:
  """A request in words.

  Example:
    >>> describe(Get(7, "log/12"))
    "get of 'log/12'"
  """
  match request:
    case Delete(_, keys):
      more = ", ..." if len(keys) > 3 else ""
      return f"delete of {', '.join(map(repr, keys[:3]))}{more}"
    case Get(_, key):
      return f"get of {key!r}"
  return f"put of {request.key!r}"
