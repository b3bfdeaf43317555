"""The log in the store: one process appends to it, others read what they lack.

Neither waits: each makes one request to the store at a time, and continues with
the answer. `entries` has the two rules that make deletion safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from optax_dist.coordinator.protocol.effects import Delete, Effect, Get, Put
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Entry,
  Record,
  Trimmed,
)
from optax_dist.coordinator.protocol.inputs import GetAnswered, PutAnswered

RUN_KEY = "run"
LEADER_KEY = "leader"

# Records that each replica keeps, in case it becomes leader: the journal may lack
# the steps of leaders that were lost. And how many of them it tells its members,
# who may not reach the store, and may lack those records, too.
KEPT, TOLD = 16, 4

# Numbers requests to the store, so that answers can be assigned.
Count: TypeAlias = Callable[[], int]


def record_key(position: int) -> str:
  """The key of a record of the log."""
  return f"log/{position}"


def marker_key(position: int, block: int) -> str:
  """The key of the marker of this position's block, once it is trimmed."""
  return f"trimmed/{position // block}"


def all_keys(end: int, block: int) -> list[str]:
  """The keys of a whole run whose log ends there, trimmed or not."""
  records = [record_key(position) for position in range(end + 1)]
  markers = [marker_key(position, block) for position in range(0, end, block)]
  return [RUN_KEY, LEADER_KEY, *markers, *records]


@dataclasses.dataclass(frozen=True, slots=True)
class Appended:
  """A record is in the log, and effects held back for it may be sent."""

  position: int
  record: Record
  effects: tuple[Effect, ...]


class StoreWatch:
  """How a process reaches the store.

  Attributes:
    shortest: the shortest answer to a request, in seconds; 0.0 before the first.
    reached: whether it has ever answered a question.
    silent: whether it has not answered the last one.
  """

  def __init__(self) -> None:
    self.shortest = 0.0
    self.reached = self.silent = False
    self._asked: dict[int, float] = {}

  def asked(self, effects: Iterable[Effect], now: float) -> None:
    """Requests among these effects go out now."""
    for effect in effects:
      if isinstance(effect, (Get, Put)):
        self._asked[effect.request] = now

  def answered(self, answer: PutAnswered | GetAnswered, now: float) -> None:
    """The answer to a request has come."""
    asked = self._asked.pop(answer.request, None)
    if isinstance(answer, GetAnswered):
      self.silent = not answer.known
      self.reached |= answer.known
      unknown = not answer.known
    else:
      unknown = answer.answer == "unknown"
    if asked is None or unknown:
      return
    took = now - asked
    self.shortest = min(self.shortest or took, took)


class LogWriter:
  """A leader's end of the log: puts one record at a time, in order.

  The leader's effects are held back until the decisions behind them are in the
  log. If a put has no answer, or is refused, the leader looks whether its record
  is there; if not, it puts that record again, and never another one at that
  position. Another process's record means that the leader was replaced, because
  none is equal to this one's.

  Attributes:
    position: position of the next record.
    record: the record being put, or None.
    deposed: whether another process is leader now.
    since: when the current put began.
  """

  def __init__(self, term: int, position: int, count: Count):
    self.position, self.record = position, None  # type: int, Record | None
    self.deposed = False
    self.since = 0.0
    self._term, self._count = term, count
    self._request = -1
    # The entries of the next record, and the effects held back for it; then those
    # held back for the record being put.
    self._entries: list[Entry] = []
    self._held_for_next: list[Effect] = []
    self._held: list[Effect] = []

  @property
  def pending(self) -> bool:
    """Whether a decision is not in the log yet."""
    return self.record is not None or bool(self._entries)

  @property
  def means(self) -> int:
    """Bytes of the means in the next record."""
    commits = (e for e in self._entries if isinstance(e, Committed))
    return sum(len(commit.mean or b"") for commit in commits)

  def add(self, entry: Entry) -> None:
    """Adds an entry to the next record."""
    self._entries.append(entry)

  def say(self, effects: list[Effect], effect: Effect) -> None:
    """Sends an effect now, or once all decisions so far are in the log."""
    if self._entries:
      self._held_for_next.append(effect)
    elif self.record is not None:
      self._held.append(effect)
    else:
      effects.append(effect)

  def flush(self, now: float) -> Put | None:
    """Puts what was decided, unless a put is in progress."""
    if self.record is not None or self.deposed or not self._entries:
      return None
    self.record, self.since = Record(self._term, tuple(self._entries)), now
    self._entries = []
    self._held, self._held_for_next = self._held_for_next, []
    return self._put(self.record)

  def probe(self) -> Get | Put | None:
    """Puts the record again that is not there, or looks for another leader's."""
    if self.record is None:
      self._request = self._count()
      return Get(self._request, record_key(self.position))
    return None if self._request >= 0 else self._put(self.record)

  def _put(self, record: Record) -> Put:
    self._request = self._count()
    return Put(self._request, record_key(self.position), record)

  def answered(
    self, answer: PutAnswered | GetAnswered
  ) -> Appended | Get | None:
    """Continues with the store's answer: done, or a look at what is there."""
    if answer.request != self._request:
      return None
    match answer:
      case PutAnswered(_, "done"):
        return self._done()
      case PutAnswered():
        self._request = self._count()
        return Get(self._request, record_key(self.position))
      case GetAnswered(_, _, None):
        self._request = -1  # It is not there, or nobody knows.
      case GetAnswered(_, _, value) if value == self.record:
        return self._done()
      case GetAnswered():
        self.deposed = True
    return None

  def _done(self) -> Appended:
    assert self.record is not None
    done = Appended(self.position, self.record, tuple(self._held))
    self.position += 1
    self.record, self._held = None, []
    return done


class Trimmer:
  """Deletes old blocks of the log, except for records with a `Term`."""

  def __init__(self, block: int, count: Count):
    self._block, self._count = block, count
    # Blocks whose marker may not be written yet, and the request to put it.
    self._due: dict[int, int] = {}

  def trim(self, position: int, untouched: bool) -> list[Put]:
    """Marks old blocks once the log is far enough beyond them.

    Args:
      position: position of the next record.
      untouched: whether no step has been committed. If all replicas die, a new
        one can still begin the run anew, if it has read the whole log.
    """
    old = position // self._block - 2
    if position % self._block or old < 0:
      return []
    self._due[old] = -1
    if untouched:
      return []
    puts = []
    for block in self._due:
      self._due[block] = request = self._count()
      key = marker_key(block * self._block, self._block)
      puts.append(Put(request, key, Trimmed(block)))
    return puts

  def answered(self, answer: PutAnswered, terms: list[int]) -> list[Delete]:
    """Deletes a block once its marker is written."""
    if answer.answer == "unknown":
      return []
    for block, request in self._due.items():
      if request == answer.request:
        del self._due[block]
        positions = range(block * self._block, (block + 1) * self._block)
        kept = set(terms)
        return [
          Delete(tuple(record_key(p) for p in positions if p not in kept))
        ]
    return []


Found: TypeAlias = list[tuple[int, Record]]


@dataclasses.dataclass(frozen=True, slots=True)
class LogRead:
  """The result of a `LogReader`.

  Attributes:
    records: records with their positions, in order; possibly none.
    end: whether there is no record behind them.
  """

  records: tuple[tuple[int, Record], ...]
  end: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FellOff:
  """The log was trimmed beyond the read position; read on at `position`."""

  position: int


ReadResult: TypeAlias = LogRead | FellOff | Literal["unknown"]


class LogReader:
  """Reads the log from a position on; `entries` explains the order of reads."""

  def __init__(self, block: int, count: Count):
    self._block, self._count = block, count
    self._request = -1
    self._reading_marker = False
    self._start = self._position = 0
    self._found: Found = []
    self._end = False

  @property
  def busy(self) -> bool:
    """Whether a request is open."""
    return self._request >= 0

  def read(self, position: int) -> Get:
    """Starts to read; cancels the current read."""
    self._start = self._position = position
    self._found, self._end = [], False
    return self._get(record_key(position))

  def stop(self) -> None:
    """Ignores the answer to the open request."""
    self._request = -1

  def _get(self, key: str, marker: bool = False) -> Get:
    self._request, self._reading_marker = self._count(), marker
    return Get(self._request, key)

  def answered(self, answer: GetAnswered) -> ReadResult | Get | None:
    """Continues with the store's answer: the result, or the next request."""
    if answer.request != self._request:
      return None
    self._request = -1
    if not answer.known:
      return "unknown"
    if self._reading_marker:
      if answer.value is not None:
        return FellOff((self._start // self._block + 1) * self._block)
      return LogRead(tuple(self._found), self._end)
    if isinstance(answer.value, Record):
      self._found.append((self._position, answer.value))
      self._position += 1
    else:
      self._end = True
    if self._end or self._position % self._block == 0:
      # Only now: the record that was found may be older than the marker.
      return self._get(marker_key(self._start, self._block), marker=True)
    return self._get(record_key(self._position))
