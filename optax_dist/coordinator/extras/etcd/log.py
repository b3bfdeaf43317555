"""The coordinator's log in etcd: one key for each record, in order.

    PREFIX/log/RUN/000000000000      a record, or the first piece of a large one
    PREFIX/log/RUN/000000000001      ...

A record is put where none is, and only while the coordinator has its lease; if the
answer is lost, it asks again until it is known. Of a record whose coordinator died
before its last piece was put, the next one removes the pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from optax_dist.coordinator.extras.etcd import client, place
from optax_dist.coordinator.extras.etcd.lease import Lease
from optax_dist.coordinator.extras.etcd.place import Etcd
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import RECORDS, Record
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.server.log import LogError

# Bytes of a piece, and pieces read at once: an answer must be below 4 MiB.
_PIECE, _AT_ONCE = 128 << 10, 16
# Records and bytes after which the log is written anew, as one record. Etcd keeps
# what was deleted until it is compacted itself.
_MANY, _LARGE = 512, 16 << 20
_FIRST, _LAST = 1, 2  # Which piece of a record it is.
# Seconds for one request, and between two attempts to write what etcd refuses.
_REQUEST_SECONDS, _RETRY_SECONDS = 2.0, 5.0
_REMEDY = "Resume from a checkpoint, with a ?prefix= of its own."


class EtcdLog:
  """A log in etcd, of the coordinator that has the lease; see `server.log.Log`."""

  def __init__(self, where: Etcd, run: str, secret: bytes, lease: Lease):
    """Uses the log of one run; nothing is read or written yet.

    Args:
      where: the keys.
      run: the run's name.
      secret: the job's.
      lease: this coordinator's.
    """
    self._folder, self._secret, self._lease = where.folder(run), secret, lease
    self._asked = client.Client(where.servers)
    # The first key and the next one, and what was written since the last time
    # that all was written anew.
    self._start = self._next = 0
    self._records = self._bytes = 0
    self._trouble, self._retry_at = "", 0.0

  def read(self) -> History:
    """What it says; a last record of which pieces are missing is removed.

    Raises:
      LogError: it is no log of this version and job, or is damaged.
    """
    history = History()
    start, piece, whole = 0, b"", True
    for at, raw in self._pieces():
      if not raw or at != self._next:
        what = f"{self._folder}{self._next:012d} is missing"
        raise LogError(f"The log in etcd is damaged: {what}. {_REMEDY}")
      self._next = at + 1
      if raw[0] & _FIRST:
        start, piece = at, b""
      piece, whole = piece + raw[1:], bool(raw[0] & _LAST)
      if whole:
        self._apply(history, piece, start)
        self._records += 1
        self._bytes += len(piece)
    if not whole:
      self._delete(start, self._next)
      self._next = start
    return history

  def append(self, record: Record, history: History) -> str:
    """Writes a record, or all of it anew once there are many.

    Raises:
      LogError: another coordinator may have the lease.
    """
    if self._trouble and time.monotonic() < self._retry_at:
      return self._trouble
    try:
      if self._trouble:
        self._write_anew(history)
      else:
        self._write(record)
    except client.Rejected as error:
      self._trouble, self._retry_at = (
        str(error),
        time.monotonic() + _RETRY_SECONDS,
      )
      return self._trouble
    self._trouble = ""
    if self._records > _MANY or self._bytes > _LARGE:
      try:
        self._write_anew(history)
      except client.Rejected:
        return ""  # What was there is still there, and good.
    return ""

  def close(self) -> None:
    """Closes the connection; the lease belongs to the caller."""
    self._asked.close()

  def _pieces(self) -> Iterator[tuple[int, bytes]]:
    """The position and the bytes of each piece."""
    key, end = self._folder.encode(), self._folder[:-1].encode() + b"0"
    first = True
    while True:
      found = self._range(key, end)
      for pair in found.get("kvs", ()):
        key = place.decoded(pair["key"])
        name = key.decode(errors="replace")
        try:
          raw = place.unseal(self._secret, name, pair)
          at = int(name.removeprefix(self._folder))
        except (place.Foreign, ValueError) as error:
          raise LogError(f"{error}. {_REMEDY}") from None
        if first:
          self._start = self._next = at
          first = False
        yield at, raw
      if not found.get("more"):
        return
      key += b"\0"

  def _range(self, key: bytes, end: bytes) -> dict[str, Any]:
    body = {
      "key": place.encoded(key),
      "range_end": place.encoded(end),
      "limit": _AT_ONCE,
    }
    while True:
      self._lease.check()
      try:
        return self._asked.ask(
          "kv/range", body, time.monotonic() + _REQUEST_SECONDS
        )
      except client.NoAnswer:
        continue
      except client.Rejected as error:
        raise LogError(f"The log in etcd can't be read: {error}.") from None

  def _apply(self, history: History, raw: bytes, at: int) -> None:
    try:
      history.apply(RECORDS.decode(raw))
    except codec.BadMessage as error:
      raise LogError(
        f"The log in etcd has a record at {self._key(at)} that this version can't"
        f" read ({error}). {_REMEDY}"
      ) from None
    except ValueError as error:
      raise LogError(
        f"The log in etcd is damaged: {error}. {_REMEDY}"
      ) from None

  def _write(self, record: Record) -> None:
    raw = RECORDS.encode(record)
    starts = range(0, len(raw), _PIECE)
    for start in starts:
      flags = _FIRST * (start == 0) | _LAST * (start == starts[-1])
      self._put(bytes([flags]) + raw[start : start + _PIECE])
    self._records += 1
    self._bytes += len(raw)

  def _put(self, value: bytes) -> None:
    while True:
      key = self._key(self._next)
      put = {
        "key": place.encoded(key),
        "value": place.sealed(self._secret, key, value),
      }
      found = self._lease.write([{"request_put": put}], self._asked, absent=key)
      self._next += 1
      if found.get("succeeded"):
        return
      # The lease is ours, so it is what was put before an answer got lost.
      pair = found["responses"][1]["response_range"]["kvs"][0]
      try:
        other = place.unseal(self._secret, key, pair)
      except place.Foreign as error:
        raise LogError(f"{error}. {_REMEDY}") from None
      if other == value:
        return

  def _write_anew(self, history: History) -> None:
    """Writes one record of all that was decided; then deletes those before."""
    start = self._next
    self._write(Record((history.compacted(),)))
    self._delete(self._start, start)
    self._start, self._records, self._bytes = start, 0, 0

  def _delete(self, start: int, stop: int) -> None:
    keys = {
      "key": place.encoded(self._key(start)),
      "range_end": place.encoded(self._key(stop)),
    }
    self._lease.write([{"request_delete_range": keys}], self._asked)

  def _key(self, position: int) -> str:
    return f"{self._folder}{position:012d}"
