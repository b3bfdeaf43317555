"""Where every second of every replica of a recorded run went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate import goodput
from optax_dist.simulate.goodput import Goodput


class Span(NamedTuple):
  """A stretch of a replica's time.

  Attributes:
    replica: whose.
    begin, end: seconds since the run's start.
    category: of `goodput.CATEGORIES`.
  """

  replica: Replica
  begin: float
  end: float
  category: str


class Ledger(NamedTuple):
  """The whole time of all replicas of a run.

  Attributes:
    spans: of each replica, without gap or overlap, from 0 to `seconds`.
    seconds: how long the run took.
    replicas: in the order of tables.
  """

  spans: tuple[Span, ...]
  seconds: float
  replicas: tuple[Replica, ...]

  def goodput(self, replica: Replica | None = None) -> Goodput:
    """Replica-seconds by category: of all, or of one replica."""
    total = dict.fromkeys(goodput.CATEGORIES, 0.0)
    for span in self.spans:
      if replica is None or span.replica == replica:
        total[span.category] += span.end - span.begin
    return goodput.make(total)

  def over_time(self, bins: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """How many replicas were at what, on average, in each stretch of time.

    Args:
      bins: how many stretches of equal length.

    Returns:
      The ends of the stretches, float64 `[bins + 1]`, and for each category
      replicas, float64 `[bins]`; they add up to all replicas.
    """
    edges = np.linspace(0.0, self.seconds, bins + 1)
    width = self.seconds / bins
    found = {category: np.zeros(bins) for category in goodput.CATEGORIES}
    for _, begin, end, category in self.spans:
      first = min(int(begin / width), bins - 1)
      last = min(int(end / width), bins - 1)
      at = np.arange(first, last + 1)
      inside = np.minimum(edges[at + 1], end) - np.maximum(edges[at], begin)
      found[category][at] += np.maximum(inside, 0.0) / width
    return edges, found


class _Replica:
  """One replica's time so far: everything up to `now` has its category."""

  def __init__(self, replica: Replica):
    self.replica = replica
    self.spans: list[Span] = []
    self.now = 0.0
    # What the time until its next computation is.
    self.then = "start"
    # When the step that it waits for had all it needed.
    self.waits_until: float | None = None

  def until(self, time: float, category: str) -> None:
    """Books the time up to a moment; what is booked already stays."""
    if time > self.now:
      self.spans.append(Span(self.replica, self.now, time, category))
      self.now = time

  def begin(self, start: float) -> None:
    """Books the time until a computation begins."""
    if self.waits_until is not None:
      self.until(min(self.waits_until, start), "waiting")
      self.waits_until = None
    self.until(start, self.then)
    self.then = "exchanging"


def of(records: Sequence[journal.Record]) -> Ledger:
  """Where the time of a recorded run went.

  Of a run that was resumed, the latest part counts.

  Args:
    records: of `journal.read`.

  Returns:
    The ledger.

  Raises:
    ValueError: the journal has no replica, or no time has passed in it.
  """
  parts = journal.segments(records)
  part = parts[-1] if parts else []
  found: dict[Replica, _Replica] = {}
  one = lambda name: found.setdefault(name, _Replica(name))
  for record in part:
    kind, now = record["kind"], record["time"]
    if kind == "join":
      joined = one(record["replica"])
      if joined.then == "idle":
        joined.then = "recovery"
    elif kind == "leave":
      left = one(record["replica"])
      left.begin(now)
      left.then = "idle"
    elif kind == "lost":
      lost = one(record["replica"])
      # What it was at went with it; the gradient that had come has a `drop`.
      if lost.waits_until is not None:
        lost.until(min(lost.waits_until, now), "waiting")
        lost.waits_until = None
      lost.until(now, "dropped")
      lost.then = "idle" if record.get("reason") == "replaced" else "recovery"
    elif kind in ("commit", "drop", "exchange"):
      for name, member, useful, waits_until in _contributions(record):
        _book(one(name), member, useful, waits_until, now)
  end = max((record["time"] for record in part), default=0.0)
  if not found or end <= 0:
    raise ValueError(
      "the journal has no replica that took part for any time, so there is"
      " nothing to report."
    )
  order = sorted(found, key=lambda name: (isinstance(name, str), name))
  for replica in found.values():
    if replica.waits_until is not None:
      replica.until(min(replica.waits_until, end), "waiting")
    replica.until(end, "idle")
  return Ledger(
    tuple(span for name in order for span in found[name].spans),
    end,
    tuple(order),
  )


def _contributions(
  record: journal.Record,
) -> Iterator[tuple[Replica, journal.Record, bool, float | None]]:
  """Whose, what, whether it counted, and until when its replica waited."""
  if record["kind"] != "commit":
    useful = record["kind"] == "exchange"
    yield record["replica"], record, useful, None
    return
  arrivals = [m.get("arrived") for m in record["members"]]
  known = [time for time in arrivals if time is not None]
  complete = max(known) if known else record["time"]
  for member in record["members"]:
    yield member["replica"], member, True, complete


def _book(
  replica: _Replica,
  member: journal.Record,
  useful: bool,
  waits_until: float | None,
  now: float,
) -> None:
  compute = member.get("compute")
  arrived = member.get("arrived")
  sent = now if arrived is None else arrived
  told = member.get("timings")
  compiled = encoded = 0.0
  start = sent - (compute or 0.0)
  if told is not None:
    start, sent = told["start"], told["sent"]
    compiled, encoded = told["compiled"], told["encoded"]
  if member.get("reason") == "lost":
    # Its replica is gone by now, and this was booked as `dropped` up to then.
    return
  if compute is None and told is None:
    # It was called off: all since the last thing known was for nothing.
    replica.until(sent, "dropped")
  else:
    replica.begin(start)
    computed = sent - encoded if compute is None else start + compute
    replica.until(min(start + compiled, sent), "compile")
    replica.until(min(computed, sent), "useful" if useful else "dropped")
    # Between the parts of a sum it waited to be asked for more.
    replica.until(sent - encoded, "waiting")
    replica.until(sent, "exchanging")
  replica.waits_until = waits_until
