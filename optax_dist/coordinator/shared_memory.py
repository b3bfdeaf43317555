"""Offers to processes of the same host, which read them where they lie.

Each process has a table in a file in memory, that others open through
``/proc/<pid>/fd``: who may do that is the kernel's decision (the same user), and
nothing is left behind by a process that is killed. A row of the table says
where the bytes of a ticket are; a reader looks until it is there.

Linux only; `is_available` tells.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from optax_dist.coordinator import (
  buffer_pool,
  engine,
  futex,
  message_ring,
  polling,
  process_watch,
)

_ROWS = 4096  # Offers that can stand at a time.
_HEAD = 8
_NONCE, _CLOSED, _COUNT = 0, 1, 2
_KEY, _FILE, _OFFSET, _NBYTES, _MIX = range(5)  # Columns.
_WORDS = _HEAD + 5 * _ROWS
_SIZE = 8 * _WORDS + message_ring.SIZE

_Found = TypeVar("_Found")


def is_available() -> bool:
  """Whether processes of this host can share memory by this module."""
  return (
    sys.platform == "linux"
    and hasattr(os, "memfd_create")
    and hasattr(os, "pidfd_open")
    and hasattr(os, "eventfd")
    and os.path.exists("/proc/self/fd")
  )


@functools.cache
def host_name() -> str:
  """A name that those have in common who can share memory."""
  with open("/proc/sys/kernel/random/boot_id") as file:
    boot = file.read().strip()
  return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class Place:
  """Where the table of a process is.

  Attributes:
    host: its `host_name`.
    process: the process.
    file: its descriptor of the table.
    nonce: a number in the table, which shows that it is the one meant.
  """

  host: str
  process: process_watch.Process
  file: int
  nonce: int

  def dump(self) -> str:
    """As text."""
    numbers = (self.process.pid, self.process.started, self.file, self.nonce)
    return json.dumps([self.host, *numbers], separators=(",", ":"))

  @classmethod
  def load(cls, text: str) -> Place:
    """From text; raises a `ValueError` if it is none of `dump`."""
    try:
      host, pid, started, file, nonce = json.loads(text)
    except (TypeError, ValueError):
      raise ValueError(f"Not a place in shared memory: {text!r}.") from None
    numbers = (pid, started, file, nonce)
    if not isinstance(host, str) or not all(
      type(n) is int and 0 <= n < 2**63 for n in numbers
    ):
      raise ValueError(f"Not a place in shared memory: {text!r}.")
    return cls(host, process_watch.Process(pid, started), file, nonce)


def _mix(key: int, file: int, offset: int, nbytes: int) -> int:
  """Tells a whole row from one that is half written."""
  mixed = key * 0x9E3779B97F4A7C15 + file * 0xC2B2AE3D27D4EB4F
  mixed += offset * 0x165667B19E3779F9 + nbytes * 0x27D4EB2F165667C5
  return mixed % 2**64


class OfferTable:
  """What this process offers to others of its host."""

  def __init__(self, pool: buffer_pool.BufferPool):
    self._pool = pool
    self._lock = threading.Lock()
    self._fence = threading.Lock()
    self._file = buffer_pool.memory_file("optax-dist-offers", _SIZE)
    memory = np.frombuffer(mmap.mmap(self._file, _SIZE), np.uint8)
    words = memory[: 8 * _WORDS].view(np.uint64)
    self._head = words[:_HEAD]
    self._count = futex.Word(words[_COUNT : _COUNT + 1])
    self._rows = words[_HEAD:].reshape(5, _ROWS)
    self._ring = message_ring.RingWriter(memory[8 * _WORDS :])
    self._free = collections.deque(range(_ROWS))
    nonce = secrets.randbits(62)
    self._head[_NONCE] = nonce
    self.place = Place(
      host_name(), process_watch.this_process(), self._file, nonce
    )

  def offer(self, ticket: int, array: np.ndarray) -> None:
    """Lets all readers fetch the array until its buffer is recycled."""
    buffer, offset = self._pool.find(array)
    row = [ticket + 1, buffer.file, offset, array.size]
    with self._lock:
      if not self._free:
        raise RuntimeError(
          f"More than {_ROWS} offers stand at once; recycle their buffers."
        )
      at = self._free.popleft()
      self._rows[_FILE:_MIX, at] = row[1:]
      self._rows[_MIX, at] = _mix(*row)
      with self._fence:  # What was written is seen before what follows.
        pass
      self._rows[_KEY, at] = row[0]
      buffer.on_recycle.append(lambda: self._erase(at))
      self._count.value += 1
    self._count.wake()

  def note(self, ticket: int, message: bytes) -> bool:
    """Leaves a note; see `engine.Notes.leave`."""
    if len(message) > message_ring.LARGEST:
      return False
    self._ring.put(ticket, message)
    return True

  def _erase(self, at: int) -> None:
    with self._lock:
      self._rows[_KEY, at] = 0
      self._free.append(at)

  def count(self) -> int:
    """How many offers stand."""
    with self._lock:
      return _ROWS - len(self._free)

  def close(self) -> None:
    """Tells readers that nothing more will be offered.

    What was offered stays as it is for those who have fetched it already.
    """
    with self._lock:
      if self._file < 0:
        return
      self._head[_CLOSED] = 1
      self._free = collections.deque(range(_ROWS))
      os.close(self._file)
      self._file = -1
    self._count.wake()
    self._ring.count.wake()


class _Peer:
  """Another process's table and regions, as far as they were needed."""

  def __init__(self, place: Place):
    self.pidfd = process_watch.open_process(place.process)
    self._lock = threading.Lock()
    self._pid = place.process.pid
    self._regions: dict[int, np.ndarray] = {}
    weakref.finalize(self, os.close, self.pidfd)
    table = self._map(place.file, whole=True)
    words = table[: min(table.size // 8, _WORDS) * 8].view(np.uint64)
    if table.size != _SIZE or int(words[_NONCE]) != place.nonce:
      raise self.lost("its table is not the one that was announced")
    self._head = words[:_HEAD]
    self._rows = words[_HEAD:].reshape(5, _ROWS)
    self.ring = message_ring.RingReader(table[8 * _WORDS :])
    self.offers = futex.Word(words[_COUNT : _COUNT + 1])

  def lost(self, why: str) -> engine.PeerLost:
    return engine.PeerLost(f"Process {self._pid} is lost: {why}.")

  def find(self, ticket: int, nbytes: int) -> engine.Fetched | None:
    """What stands under the ticket, if anything does."""
    key = ticket + 1
    keys = self._rows[_KEY]
    for at in np.flatnonzero(keys == key):
      _, file, offset, size, mix = (int(v) for v in self._rows[:, at])
      if mix != _mix(key, file, offset, size):
        continue  # It is being erased, and used for another one.
      if size != nbytes:
        raise self.lost(
          f"it offers {size} bytes under ticket {ticket}, not {nbytes}"
        )
      region = self._region(file, nbytes)
      if offset + nbytes > region.size:
        raise self.lost(f"its offer under ticket {ticket} is beyond its memory")

      def check(at: int = int(at)) -> None:
        if int(keys[at]) != key:
          raise engine.OfferGone(
            f"Process {self._pid} took back what it offered under {ticket}."
          )

      return engine.Fetched(region[offset : offset + nbytes], check)
    return None

  def ended(self) -> str | None:
    """Why nothing more can come from it, if so."""
    if int(self._head[_CLOSED]):
      return "it closed its exchange"
    return "it has ended" if process_watch.has_ended(self.pidfd) else None

  def _region(self, file: int, nbytes: int) -> np.ndarray:
    with self._lock:
      region = self._regions.get(file)
      if region is None:
        region = self._map(file, whole=nbytes > buffer_pool.LARGE)
        self._regions[file] = region
      return region

  def _map(self, number: int, *, whole: bool) -> np.ndarray:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if whole else 0)
    try:
      file = os.open(f"/proc/{self._pid}/fd/{number}", os.O_RDONLY)
      try:
        if process_watch.has_ended(self.pidfd):
          raise self.lost("it has ended")  # The number may be another's now.
        if not buffer_pool.is_sealed(file):
          raise self.lost("what it offers is not sealed memory")
        memory = mmap.mmap(file, 0, flags=flags, prot=mmap.PROT_READ)
      finally:
        os.close(file)
    except OSError as error:
      if isinstance(error, engine.PeerLost):
        raise
      raise self.lost(f"its memory can't be opened ({error})") from error
    return np.frombuffer(memory, np.uint8)


class Reader:
  """Fetches what other processes of this host offer."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._peers: dict[Place, _Peer] = {}
    self._closed = False

  def fetch(
    self,
    place: Place,
    ticket: int,
    nbytes: int,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> engine.Fetched:
    """Waits for an offer; see `engine.Exchange.fetch`."""
    found = self._look(
      place,
      lambda peer: peer.find(ticket, nbytes),
      lambda peer: peer.offers,
      timeout,
      cancelled,
    )
    if isinstance(found, TimeoutError):
      raise engine.EngineTimeout(
        f"Process {place.process.pid} offered nothing under ticket"
        f" {ticket}: {found}."
      )
    return found

  def note(
    self,
    place: Place,
    tickets: Sequence[int],
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
  ) -> tuple[int, bytes] | None:
    """Waits for a note; see `engine.Notes.find`."""

    def find(peer: _Peer) -> tuple[int, bytes] | None:
      for ticket in tickets:
        message = peer.ring.find(ticket)
        if message is not None:
          return ticket, message
      return None

    found = self._look(
      place,
      find,
      lambda peer: peer.ring.count,
      timeout,
      cancelled,
    )
    return None if isinstance(found, TimeoutError) else found

  def _look(
    self,
    place: Place,
    find: Callable[[_Peer], _Found | None],
    changes: Callable[[_Peer], futex.Word],
    timeout: float,
    cancelled: Callable[[], bool] | None,
  ) -> _Found | TimeoutError:
    """What is found first, or why nothing was."""
    peer = self._peer(place)
    word = changes(peer)
    wait = polling.Polling(timeout, cancelled, word)
    while True:
      if self._closed:
        raise engine.PeerLost("The exchange has been closed.")
      seen = word.value
      try:
        found = find(peer)
        # The last one of a process that has ended may have come in between.
        if found is None and (why := peer.ended()):
          found = find(peer)
          if found is None:
            raise peer.lost(why)
      except engine.PeerLost:
        self._drop(place)
        raise
      if found is not None:
        return found
      try:
        wait.pause(seen)
      except TimeoutError as error:
        return error

  def close(self) -> None:
    """Ends all waits."""
    with self._lock:
      self._closed = True
      self._peers.clear()

  def _peer(self, place: Place) -> _Peer:
    with self._lock:
      if self._closed:
        raise engine.PeerLost("The exchange has been closed.")
      if place not in self._peers:
        self._peers[place] = _Peer(place)
      return self._peers[place]

  def _drop(self, place: Place) -> None:
    with self._lock:
      self._peers.pop(place, None)
