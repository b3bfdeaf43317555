"""The records of a coordinator's log in etcd: keys in order.

    PREFIX/log/RUN/000000000000      a record, or the first piece of a large one
    PREFIX/log/RUN/000000000001      ...

A piece is put where none is, and only while the coordinator has its lease; if the
answer is lost, it asks again until it is known. A record whose coordinator died
before its last piece was put is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optax_dist.coordinator.extras.etcd import client, keys
from optax_dist.coordinator.extras.etcd.lease import REQUEST_SECONDS, Lease
from optax_dist.coordinator.server.log import LogError

# Bytes of a piece, and pieces read at once: an answer must be below 4 MiB.
_PIECE, _AT_ONCE = 128 << 10, 16
# How many keys the log may have before it is written anew, as one record. Etcd keeps
# deleted keys until it is compacted itself.
_MANY = 512
_REMEDY = "Resume from a checkpoint, with a ?prefix= of its own."
_FIRST, _LAST = 1, 2  # Which piece of a record it is.


class EtcdRecords:
  """The records of a run, for the coordinator that has the lease.

  See `server.log.Records`; `str` names them.
  """

  def __init__(self, lease: Lease, run: str):
    """Nothing is read or written yet."""
    self._lease, self._prefix = lease, lease.where.log_prefix(run)
    # The first key and the next one, and the one at which it is long.
    self._start = self._next = 0
    self._limit = _MANY

  def __str__(self) -> str:
    return f"{self._prefix} in etcd"

  @property
  def is_long(self) -> bool:
    return self._next > self._limit

  def read(self) -> Iterator[bytes]:
    """All records, in order.

    Raises:
      LogError: a piece is missing, or no process of this job wrote it.
    """
    pieces: list[bytes] = []
    for at, raw in self._pieces():
      if not raw or at != self._next:
        what = f"{self._key(self._next)} is missing"
        raise LogError(f"The log {self} is damaged: {what}. {_REMEDY}")
      self._next = at + 1
      if raw[0] & _FIRST:
        pieces.clear()
      pieces.append(raw[1:])
      if raw[0] & _LAST:
        yield b"".join(pieces)

  def append(self, record: bytes, durable: bool) -> None:
    """Writes a record.

    Raises:
      OSError: etcd refuses it at present.
      LogError: another coordinator may have the lease.
    """
    starts = range(0, len(record), _PIECE)
    for start in starts:
      flags = _FIRST * (start == 0) | _LAST * (start == starts[-1])
      self._put(bytes([flags]) + record[start : start + _PIECE])

  def replace(self, record: bytes) -> None:
    """Writes a record in place of all before; raises as `append` does."""
    start = self._next
    self.append(record, durable=True)
    old = {
      "key": keys.encoded(self._key(self._start)),
      "range_end": keys.encoded(self._key(start)),
    }
    self._lease.write({"request_delete_range": old})
    self._start, self._limit = start, self._next + _MANY

  def close(self) -> None:
    """Does nothing: the lease belongs to the caller."""

  def _pieces(self) -> Iterator[tuple[int, bytes]]:
    """The position and the bytes of each piece."""
    start, end = self._prefix.encode(), self._prefix[:-1].encode() + b"0"
    more = True
    while more:
      answer = self._range(start, end)
      for pair in answer.get("kvs", ()):
        start = keys.decoded(pair["key"])
        key = start.decode(errors="replace")
        try:
          raw = keys.unseal(self._lease.secret, key, pair)
          at = int(key.removeprefix(self._prefix))
        except (keys.Foreign, ValueError) as error:
          raise LogError(f"{error}. {_REMEDY}") from None
        if not self._next:
          self._start = self._next = at
          self._limit = at + _MANY
        yield at, raw
      more = bool(answer.get("more"))
      start += b"\0"

  def _range(self, start: bytes, end: bytes) -> dict[str, Any]:
    body = {
      "key": keys.encoded(start),
      "range_end": keys.encoded(end),
      "limit": _AT_ONCE,
    }
    while True:
      self._lease.check()
      try:
        return self._lease.client.ask("kv/range", body, REQUEST_SECONDS)
      except client.NoAnswer:
        continue
      except client.Rejected as error:
        raise LogError(f"The log {self} can't be read: {error}.") from None

  def _put(self, value: bytes) -> None:
    written = False
    while not written:
      key = self._key(self._next)
      pair = keys.sealed(self._lease.secret, key, value)
      answer = self._lease.write({"request_put": pair}, absent=key)
      self._next += 1
      written = bool(answer.get("succeeded"))
      if not written:
        # Only this process can have written the key, as it has the lease: the answer to
        # an earlier try got lost.
        before = answer["responses"][1]["response_range"]["kvs"][0]
        try:
          written = keys.unseal(self._lease.secret, key, before) == value
        except keys.Foreign as error:
          raise LogError(f"{error}. {_REMEDY}") from None

  def _key(self, position: int) -> str:
    return f"{self._prefix}{position:012d}"
