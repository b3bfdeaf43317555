"""The keys and values of a store, within a quota; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.store import interface

Reply: TypeAlias = (
  interface.Done
  | interface.Conflict
  | interface.Value
  | interface.Absent
  | interface.Refused
)


class _QuotaExceeded(Exception):
  """There is no room."""


@dataclasses.dataclass(frozen=True)
class Quota:
  """Limits on what a store holds.

  One client may use up half of it, so that a client that floods the store does
  not end the others' run.

  Attributes:
    keys: the largest number of keys.
    nbytes: the largest number of bytes in keys and values.
  """

  keys: int = 100_000
  nbytes: int = 256 << 20

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 2:
        raise ValueError(f"Quota.{field.name} must be at least 2, got {value}.")


class Entry(NamedTuple):
  """A stored value.

  Attributes:
    value: its bytes.
    client: the client that put it.
  """

  value: bytes
  client: str


@dataclasses.dataclass
class _Usage:
  keys: int = 0
  nbytes: int = 0


class Table:
  """Keys and values.

  Example:
    >>> table = Table()
    >>> table.answer("a", interface.PutIfAbsent(1, "log/0", b"mine"))
    Done(request=1)
    >>> table.answer("b", interface.PutIfAbsent(5, "log/0", b"yours"))
    Conflict(request=5, value=b'mine')
  """

  def __init__(self, quota: Quota | None = None):
    """Creates an empty table."""
    self._quota = quota or Quota()
    self._entries: dict[str, Entry] = {}
    self._all, self._by_client = _Usage(), dict[str, _Usage]()

  def answer(self, client: str, request: interface.Request) -> Reply:
    """Executes a request."""
    number = request.request
    if isinstance(request, interface.Delete):
      self._delete(request.keys)
      return interface.Done(number)
    found = self._entries.get(request.key)
    match request:
      case interface.Get():
        if found is None:
          return interface.Absent(number)
        return interface.Value(number, found.value)
      case interface.PutIfAbsent() if found is not None:
        if found.value != request.value:
          return interface.Conflict(number, found.value)
      case _:
        try:
          self._put(client, request.key, request.value)
        except _QuotaExceeded as error:
          return interface.Refused(number, str(error))
    return interface.Done(number)

  def _put(self, client: str, key: str, value: bytes) -> None:
    before = self._entries.get(key)
    size = len(key) + len(value)
    self._check_room(client, key, size, before)
    self._delete((key,))
    self._entries[key] = Entry(bytes(value), client)
    for usage in (self._all, self._by_client.setdefault(client, _Usage())):
      usage.keys += 1
      usage.nbytes += size

  def _check_room(
    self, client: str, key: str, size: int, before: Entry | None
  ) -> None:
    mine = self._by_client.get(client, _Usage())
    for usage, share, whose in (
      (self._all, 1, ""),
      (mine, 2, f" of one client ({client})"),
    ):
      keys, nbytes = usage.keys, usage.nbytes
      if before is not None and (share == 1 or before.client == client):
        # The overwritten value makes room.
        keys, nbytes = keys - 1, nbytes - len(key) - len(before.value)
      most, most_bytes = self._quota.keys // share, self._quota.nbytes // share
      if keys >= most or nbytes + size > most_bytes:
        raise _QuotaExceeded(
          f"{key!r} needs {size:,} bytes, and the store holds at most {most:,}"
          f" keys and {most_bytes:,} bytes{whose}; it has {keys:,} and"
          f" {nbytes:,}"
        )

  def _delete(self, keys: Iterable[str]) -> None:
    for key in keys:
      found = self._entries.pop(key, None)
      if found is None:
        continue
      mine = self._by_client[found.client]
      for usage in (self._all, mine):
        usage.keys -= 1
        usage.nbytes -= len(key) + len(found.value)
      if not mine.keys:
        del self._by_client[found.client]
