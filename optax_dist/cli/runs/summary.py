"""A summary of a run so far, from its journal: the run, and each replica."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]

# Number of commits over which rates are computed.
_WINDOW = 50


@dataclasses.dataclass
class ReplicaSummary:
  """The summary of one replica.

  Attributes:
    replica: its index.
    state: "in", "left" or "lost".
    accepted: gradients in committed steps.
    dropped: gradients that were dropped, by reason.
    losses: how often its process was lost.
    waits: total seconds from its arrivals to their commits.
    arrivals: number of these arrivals.
    seen: when the journal last mentioned it, in seconds since the run's start.
    computed: seconds that its last gradient took; None if unknown.
    host: the host of its process; "" if unknown.
    pid: its process on that host; None if unknown.
    ended: how its last process has ended; "" if none has, or it is back.
  """

  replica: int | str
  state: str = "in"
  accepted: int = 0
  dropped: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  losses: int = 0
  waits: float = 0.0
  arrivals: int = 0
  seen: float = 0.0
  computed: float | None = None
  host: str = ""
  pid: int | None = None
  ended: str = ""

  @property
  def wait(self) -> float:
    """Its mean wait for a commit, in seconds."""
    return self.waits / self.arrivals if self.arrivals else 0.0

  @property
  def process(self) -> str:
    """Its host and process id; "" if unknown."""
    return "" if self.pid is None else f"{self.host}: {self.pid}"


class RunSummary:
  """The summary of a run; a resumed one counts from its last start.

  Attributes:
    run: the record of its start, or None.
    replicas: replicas by index.
    step: committed steps.
    leader: the current leader.
    terms: number of terms so far.
    abandoned: attempts that failed.
    time: time of the last record, in seconds since the start.
    committed: time of the last commit.
    finish: the record of its end, or None.
    reported: what the run's own script reports, for people.
    stall: the last record that names the missing replicas, if there was no
      commit since.
  """

  def __init__(self) -> None:
    self.reported = ""
    self._begin(None)

  def _begin(self, run: Record | None) -> None:
    self.run = run
    self.replicas: dict[int | str, ReplicaSummary] = {}
    self.step = run["step"] if run else 0
    self.leader: int | str | None = None
    self.terms = 0
    self.abandoned = 0
    self.time = self.committed = 0.0
    self.finish: Record | None = None
    self.stall: Record | None = None
    self._commits: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self._read_at = 0.0

  def update(self, records: Iterable[Record], age: float = 0.0) -> None:
    """Processes further records.

    Args:
      records: in order.
      age: how many seconds ago the last of them was written.
    """
    for record in records:
      if record["kind"] == "run":
        self._begin(record)
      self._read_at = time.monotonic() - age
      self.time = max(self.time, record["time"])
      handler = getattr(self, f"_on_{record['kind']}", None)
      if handler is not None:
        handler(record)

  def now(self) -> float:
    """Seconds since the run's start: now, or at its end."""
    if self.run is None or self.finish is not None:
      return self.time
    return self.time + time.monotonic() - self._read_at

  def rate(self) -> float:
    """Steps per second, over the last commits."""
    if len(self._commits) < 2:
      return 0.0
    until = self.now() if self.finish is None else self._commits[-1]
    return (len(self._commits) - 1) / max(until - self._commits[0], 1e-9)

  def waiting_for(self) -> str:
    """The replicas that the run waits for; "" if it makes progress."""
    if self.finish is not None:
      return ""
    quiet = self.now() - self.committed
    usual = 1.0 / rate if (rate := self._usual_rate()) else 1.0
    if quiet < max(3.0, 5 * usual):
      return ""
    if self.stall is not None:
      missing = self.stall["missing"]
      groups = [missing] if isinstance(missing, list) else missing.values()
      found = [replica for group in groups for replica in group]
    else:
      found = [
        r.replica for r in self.replicas.values() if r.seen <= self.committed
      ]
    names = ", ".join(str(name) for name in found)
    return f"replica {names}, for {quiet:.1f} s" if found else ""

  def _usual_rate(self) -> float:
    if len(self._commits) < 2:
      return 0.0
    return (len(self._commits) - 1) / max(
      self._commits[-1] - self._commits[0], 1e-9
    )

  def _replica(self, record: Record) -> ReplicaSummary:
    number = record["replica"]
    found = self.replicas.setdefault(number, ReplicaSummary(number))
    found.seen = max(found.seen, record.get("arrived") or record["time"])
    return found

  def _on_leader(self, record: Record) -> None:
    self.leader = record["replica"]
    self.terms += 1

  def _on_join(self, record: Record) -> None:
    self._replica(record).state = "in"

  def _on_leave(self, record: Record) -> None:
    self._replica(record).state = "left"

  def _on_lost(self, record: Record) -> None:
    found = self._replica(record)
    found.state = "lost"
    found.losses += 1

  def _on_drop(self, record: Record) -> None:
    found = self._replica(record)
    found.dropped[record["reason"]] += record["count"]
    found.computed = record["compute"]

  def _on_commit(self, record: Record) -> None:
    if record["step"] < self.step:
      return  # A new leader has repeated it.
    self.step = record["step"] + 1
    self.committed = record["time"]
    self._commits.append(record["time"])
    self.stall = None
    for member in record["members"]:
      found = self._replica({"time": record["time"]} | member)
      found.accepted += member["count"]
      found.computed = member["compute"]
      if member["arrived"] is not None:
        found.waits += max(0.0, record["time"] - member["arrived"])
        found.arrivals += 1

  def _on_abandon(self, record: Record) -> None:
    self.abandoned += 1

  def _on_stall(self, record: Record) -> None:
    self.stall = record

  def _on_cannot_proceed(self, record: Record) -> None:
    self.stall = record

  def _on_process(self, record: Record) -> None:
    number = record["replica"]
    found = self.replicas.setdefault(number, ReplicaSummary(number))
    found.host, found.pid = record["host"], record["pid"]
    found.ended = record["ended"] or ""

  def _on_finish(self, record: Record) -> None:
    self.finish = record
