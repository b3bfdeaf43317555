"""The keys and values of a store, within a quota; pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator.store import interface

# The most that a store holds, in bytes. One client may use up half of it, so that a
# client that floods the store does not end the others' run.
QUOTA = 256 << 20
# What a key takes besides its characters and its value.
OVERHEAD = 1 << 10


class Entry(NamedTuple):
  """A stored value.

  Attributes:
    value: its bytes.
    client: the client that put it.
  """

  value: bytes
  client: str


class Table:
  """Keys and values.

  Example:
    >>> table = Table()
    >>> table.answer("a", interface.PutIfAbsent(1, "log/0", b"mine"))
    Done(request=1)
    >>> table.answer("b", interface.PutIfAbsent(5, "log/0", b"yours"))
    Conflict(request=5, value=b'mine')
  """

  def __init__(self, quota: int = QUOTA):
    """Creates an empty table.

    Args:
      quota: the most bytes that it holds.
    """
    self._quota = quota
    self._entries: dict[str, Entry] = {}
    # Bytes, by client.
    self._used: collections.Counter[str] = collections.Counter()

  def answer(self, client: str, request: interface.Request) -> interface.Answer:
    """Executes a request."""
    number = request.request
    if isinstance(request, interface.Delete):
      self._delete(request.keys)
      return interface.Done(number)
    found = self._entries.get(request.key)
    match request:
      case interface.Get():
        return interface.Value(number, None if found is None else found.value)
      case interface.PutIfAbsent() if found is not None:
        if found.value != request.value:
          return interface.Conflict(number, found.value)
      case _:
        refused = self._put(client, request.key, request.value)
        if refused:
          return interface.Unknown(number, refused)
    return interface.Done(number)

  def _put(self, client: str, key: str, value: bytes) -> str:
    """Puts a value, if there is room; otherwise says why not."""
    size, used, own = _size(key, value), self._used.total(), self._used[client]
    before = self._entries.get(key)
    if before is not None:  # It makes room.
      used -= _size(key, before.value)
      own -= _size(key, before.value) if before.client == client else 0
    if used + size > self._quota or own + size > self._quota // 2:
      return (
        f"{key!r} needs {size:,} bytes, and the store holds at most"
        f" {self._quota:,}, half of it of one client; it has {used:,}, and"
        f" {own:,} of {client}"
      )
    self._delete((key,))
    self._entries[key] = Entry(bytes(value), client)
    self._used[client] += size
    return ""

  def _delete(self, keys: Iterable[str]) -> None:
    for key in keys:
      found = self._entries.pop(key, None)
      if found is not None:
        self._used[found.client] -= _size(key, found.value)
        if not self._used[found.client]:
          del self._used[found.client]


def _size(key: str, value: bytes) -> int:
  return len(key) + len(value) + OVERHEAD
