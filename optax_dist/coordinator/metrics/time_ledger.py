"""How every replica spent its time, computed from a journal's records."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica, ordered

# The categories, in the order of tables and plots.
CATEGORIES = {
  "useful": "computing that became part of the model",
  "waiting": "for the other replicas of a step",
  "exchanging": "sending, receiving and applying",
  "dropped": "computing that was stale, dropped, or lost with a replica",
  "compile": "tracing and compiling programs",
  "start": "from the start of the run until a replica first computes",
  "recovery": "what failures cost besides: saving, restarting, catching up",
  "idle": "not there, or with nothing to do",
}

# Intervals of a replica that are kept, unless all are.
_MAX_SPANS_KEPT = 5000


class Goodput(NamedTuple):
  """Replica-seconds by category.

  Attributes:
    seconds: time in each of `CATEGORIES`; they add up to the total.

  Example:
    >>> goodput = Goodput(dict.fromkeys(CATEGORIES, 0.0) | {"useful": 6, "idle": 2})
    >>> goodput.total, goodput.goodput
    (8.0, 0.75)
  """

  seconds: dict[str, float]

  @property
  def total(self) -> float:
    """All replica-seconds."""
    return sum(self.seconds.values())

  @property
  def goodput(self) -> float:
    """The share that was useful."""
    return self.share("useful")

  def share(self, category: str) -> float:
    """The share of a category in all seconds; 0 if there are none."""
    total = self.total
    return self.seconds[category] / total if total else 0.0

  def shares(self) -> dict[str, float]:
    """The share of each category; they add up to 1."""
    return {category: self.share(category) for category in CATEGORIES}


class Span(NamedTuple):
  """An interval of a replica's time.

  Attributes:
    replica: the replica.
    begin, end: seconds since the run's start.
    category: one of `CATEGORIES`.
  """

  replica: Replica
  begin: float
  end: float
  category: str


class _Replica:
  """One replica's time so far: all of it up to `now` has a category."""

  def __init__(self, replica: Replica, keep: float):
    self.replica, self.keep = replica, keep
    most = None if math.isinf(keep) else _MAX_SPANS_KEPT
    self.spans: collections.deque[Span] = collections.deque(maxlen=most)
    self.seconds = dict.fromkeys(CATEGORIES, 0.0)
    self.now = 0.0
    # The category of the time until its next computation.
    self.next_category = "start"
    # Whether its process was started again, and has not joined yet.
    self.restarts = False
    # When the step that it waits for had all the gradients it needed.
    self.waits_until: float | None = None

  def book_until(self, time: float, category: str) -> None:
    """Books the time up to a moment, from where the booked time ends."""
    if time > self.now:
      self.spans.append(Span(self.replica, self.now, time, category))
      while self.spans and self.spans[0].end < time - self.keep:
        self.spans.popleft()
      self.seconds[category] += time - self.now
      self.now = time

  def begin(self, start: float) -> None:
    """Books the time until the start of a computation."""
    if self.waits_until is not None:
      self.book_until(min(self.waits_until, start), "waiting")
      self.waits_until = None
    self.book_until(start, self.next_category)
    self.next_category = "exchanging"

  def unbooked(self, end: float) -> dict[str, float]:
    """The seconds of waiting and absence to book if the run ended now."""
    waits = 0.0
    if self.waits_until is not None:
      waits = max(0.0, min(self.waits_until, end) - self.now)
    absent = "recovery" if self.restarts else "idle"
    return {"waiting": waits, absent: max(0.0, end - self.now - waits)}


class TimeLedger:
  """Counts replica-seconds by category, record by record.

  For a resumed run, its last part counts.

  Attributes:
    end: time of the run's last record, in seconds since its start.

  Example:
    >>> times = TimeLedger()
    >>> times.update({"kind": "join", "replica": 0, "time": 1.0})
    >>> times.update({"kind": "lost", "replica": 0, "time": 4.0, "reason": ""})
    >>> times.booked()["dropped"]
    4.0
  """

  def __init__(self, *, keep: float = 0.0):
    """Starts before the first record.

    Args:
      keep: for how many seconds the intervals are kept, the last 5,000 of each
        replica at most; `math.inf` keeps all.
    """
    self._keep = keep
    self._begin()

  def _begin(self) -> None:
    self._replicas: dict[Replica, _Replica] = {}
    self.end = 0.0

  def update(self, record: journal.Record) -> None:
    """Processes the next record."""
    kind, now = record["kind"], record["time"]
    if kind == "run":
      self._begin()
    # A launcher may tell of a process long after the run.
    if now > self.end and kind != "process":
      self.end = now
    match kind:
      case "commit":
        members = record["members"]
        complete = max(
          (
            at
            for member in members
            if (at := journal.arrived(record, member)) is not None
          ),
          default=now,
        )
        for member in members:
          _book(
            self._replica(member["replica"]), record, member, True, complete
          )
      case "drop":
        _book(self._replica(record["replica"]), record, record, False, None)
      case "join":
        joined = self._replica(record["replica"])
        joined.restarts = False
        if joined.next_category in ("idle", "recovery"):
          # Booked now, since the replica may be lost again before it computes.
          joined.book_until(now, joined.next_category)
          joined.next_category = "recovery"
      case "leave":
        left = self._replica(record["replica"])
        left.begin(now)
        left.next_category = "idle"
      case "lost":
        lost = self._replica(record["replica"])
        # The replica's current work was lost with it; a gradient that had arrived has a
        # record of its own, `drop`.
        if lost.waits_until is not None:
          lost.book_until(min(lost.waits_until, now), "waiting")
          lost.waits_until = None
        lost.book_until(now, "dropped")
        replaced = record.get("reason") == "replaced"
        lost.next_category = "idle" if replaced else "recovery"
      case "process":
        started = self._replicas.get(record["replica"])
        if started is not None:
          is_lost = started.next_category == "recovery"
          started.restarts = is_lost and record["ended"] is None

  def _replica(self, name: Replica) -> _Replica:
    replica = self._replicas.get(name)
    if replica is None:
      replica = _Replica(name, self._keep)
      self._replicas[name] = replica
    return replica

  def booked(self) -> dict[str, float]:
    """Replica-seconds with a known category; none of them ever decreases."""
    total = dict.fromkeys(CATEGORIES, 0.0)
    for replica in self._replicas.values():
      for category, seconds in replica.seconds.items():
        total[category] += seconds
    return total

  @property
  def replicas(self) -> Sequence[Replica]:
    """The replicas, in the order of tables."""
    return ordered(self._replicas)

  def goodput(self, replica: Replica | None = None) -> Goodput:
    """Replica-seconds up to `end`, as if the run ended there.

    Args:
      replica: a replica; None for all of them.
    """
    total = dict.fromkeys(CATEGORIES, 0.0)
    for name, booked in self._replicas.items():
      if replica in (None, name):
        for seconds in (booked.seconds, booked.unbooked(self.end)):
          for category, more in seconds.items():
            total[category] += more
    return Goodput(total)

  def spans(self, replica: Replica | None = None) -> list[Span]:
    """The intervals that were kept, in order for each replica.

    Args:
      replica: a replica; None for all of them.
    """
    return [
      span
      for name in self.replicas
      if replica in (None, name)
      for span in self._replicas[name].spans
    ]

  def close(self) -> None:
    """Books the rest of the time: the run ends with the last record."""
    for replica in self._replicas.values():
      for category, seconds in replica.unbooked(self.end).items():
        replica.book_until(replica.now + seconds, category)


def of(records: Iterable[journal.Record]) -> TimeLedger:
  """How a recorded run spent its time.

  For a resumed run, its last part counts.

  Args:
    records: the records from `journal.read`.

  Returns:
    The whole time of all replicas: their spans have neither gap nor overlap,
    from 0 to its `end`.

  Raises:
    ValueError: the journal has no replica, or no time has passed in it.
  """
  times = TimeLedger(keep=math.inf)
  for record in records:
    times.update(record)
  if not times.replicas or times.end <= 0:
    raise ValueError(
      "the journal has no replica that took part for any time, so there is"
      " nothing to report."
    )
  times.close()
  return times


def _book(
  replica: _Replica,
  record: journal.Record,
  member: journal.Record,
  useful: bool,
  waits_until: float | None,
) -> None:
  compute = member.get("compute")
  arrived = journal.arrived(record, member)
  sent = record["time"] if arrived is None else arrived
  timings = member.get("timings")
  compiled = encoded = 0.0
  start = sent - (compute or 0.0)
  if timings is not None:
    start = sent - timings["total"]
    compiled, encoded = timings["compiled"], timings["encoded"]
  if member.get("reason") == "lost":
    # The replica was lost before, and this time was already booked as `dropped`.
    return
  if compute is None and timings is None:
    # The gradient was abandoned: the time since the last known event was wasted.
    replica.book_until(sent, "dropped")
  else:
    replica.begin(start)
    computed = sent - encoded if compute is None else start + compute
    replica.book_until(min(start + compiled, sent), "compile")
    replica.book_until(min(computed, sent), "useful" if useful else "dropped")
    # Between the parts of a sum it waited to be asked for more.
    replica.book_until(sent - encoded, "waiting")
    replica.book_until(sent, "exchanging")
  replica.waits_until = waits_until
