"""The numbers of a run, and of each replica, counted from its journal's records."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import table
from optax_dist.coordinator.metrics.time_ledger import TimeLedger
from optax_dist.quorum.events import Replica

# Seconds; from a small model on one host to rounds of local training.
_STEP_SECONDS = (
  *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
  *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
)
_STALENESS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Seconds without a line after which the writer may be gone: one that waits says so
# more often.
_SILENT = 30.0
# The description of each number.
_HELP: dict[table.Kind, dict[str, str]] = {
  "gauge": {
    "step": "Committed steps of the model.",
    "stalled_seconds": "How long the present step has stalled; 0 if it goes on.",
    "commit_age_seconds": "Time since the last commit, or since the start; 0 once"
    " the run has ended.",
    "journal_age_seconds": "Time since a line was written; 0 once the run has"
    " ended.",
    "members": "Replicas that take part.",
    "failed": "1 once the run has ended with an error.",
    "goodput_ratio": "The share of all replica-seconds that was useful.",
  },
  "counter": {
    "steps": "Steps committed in this run.",
    "gradients_applied": "Gradients in committed steps.",
    "gradients_dropped": "Gradients that did not count, by reason.",
    "samples_skipped": "Samples that were given up because their gradients were"
    " not finite.",
    "moved_bytes": "Bytes of gradients, means and states, over all replicas.",
    "stalls": "Steps that took longer than stall_warning.",
    "rounds_abandoned": "Aggregation rounds that were abandoned.",
    "membership_changes": "Replicas that joined, left, or were lost.",
    "coordinator_restarts": "How often the coordinator has started again.",
    "replica_seconds": "Where the time of all replicas went;"
    " docs/observability.md.",
  },
  "histogram": {
    "step_seconds": "From one commit to the next.",
    "staleness": "Steps by which applied gradients were late.",
  },
}
# The label that distinguishes the values of a number with several.
_LABELS = {
  "gradients_dropped": "reason",
  "moved_bytes": "direction",
  "membership_changes": "change",
  "replica_seconds": "category",
}
# Number of commits over which rates are computed.
_WINDOW = 50


def missing(record: journal.Record) -> list[Replica]:
  """The replicas that a `stall` or `cannot_proceed` names."""
  names = record["missing"]
  groups = [names] if isinstance(names, list) else names.values()
  return [replica for group in groups for replica in group]


@dataclasses.dataclass
class ReplicaNumbers:
  """The numbers of one replica.

  Attributes:
    replica: its index.
    state: "in", "left", "lost", or "starting" again; "" before it has joined.
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

  replica: Replica
  state: str = ""
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


class RunNumbers:
  """Counts the records of a run's journal; a resumed run counts from its start.

  Attributes:
    run: the record of its start, or None.
    replicas: replicas by index.
    step: committed steps of the model.
    restarts: how often the coordinator has started again.
    committed: time of the last commit.
    finish: the record of its end, or None.
    stall: the last record that names the missing replicas, if there was no
      commit since.
    staleness: staleness of the gradients in committed steps, in steps.
    times: where the time of all replicas went.

  Example:
    >>> numbers = RunNumbers()
    >>> numbers.update([
    ...   {"kind": "run", "time": 0.0, "step": 0},
    ...   {"kind": "join", "time": 0.1, "replica": 0, "step": 0}])
    >>> next(m for m in numbers.metrics() if m.name == "members").value
    1
  """

  def __init__(self, *, keep: float = 0.0):
    """Starts before the first record.

    Args:
      keep: see `TimeLedger`.
    """
    self.times = TimeLedger(keep=keep)
    # When the last record was written, by the clock of this process; None if there
    # was none.
    self._written: float | None = None
    self._begin(None)

  def _begin(self, run: journal.Record | None) -> None:
    self.run = run
    self.replicas: dict[Replica, ReplicaNumbers] = {}
    self.step = run["step"] if run else 0
    # Steps, stalls, skipped samples, abandoned rounds and starts of the coordinator.
    self._counts: collections.Counter[str] = collections.Counter()
    self.committed = 0.0
    self.finish: journal.Record | None = None
    self.stall: journal.Record | None = None
    self._step_seconds = table.Distribution(_STEP_SECONDS)
    self.staleness = table.Distribution(_STALENESS)
    self._changes = dict.fromkeys(("joined", "left", "lost"), 0)
    self._moved = {"in": 0, "out": 0}
    self._commits: collections.deque[float] = collections.deque(maxlen=_WINDOW)

  @property
  def restarts(self) -> int:
    """How often the coordinator has started again."""
    return max(0, self._counts["starts"] - 1)

  @property
  def abandoned(self) -> int:
    """How many aggregation rounds failed."""
    return self._counts["abandoned"]

  def update(self, records: Iterable[journal.Record], age: float = 0.0) -> None:
    """Processes further records.

    Args:
      records: the records, in order.
      age: how many seconds ago the last of them was written.
    """
    for record in records:
      if record["kind"] == "run":
        self._begin(record)
      self._written = time.monotonic() - age
      self._count(record)
      self.times.update(record)

  def _count(self, record: journal.Record) -> None:
    match record["kind"]:
      case "commit":
        self._commit(record)
      case "drop":
        replica = self._gradient(record, record)
        replica.dropped[record["reason"]] += record["count"]
      case "coordinator":
        self._counts["starts"] += 1
      case "join":
        self._seen(record["replica"], record["time"]).state = "in"
        self._changes["joined"] += 1
      case "leave":
        self._seen(record["replica"], record["time"]).state = "left"
        self._changes["left"] += 1
      case "lost":
        replica = self._seen(record["replica"], record["time"])
        replica.state = "lost"
        replica.losses += 1
        self._changes["lost"] += 1
      case "process":
        replica = self._replica(record["replica"])
        replica.host, replica.pid = record["host"], record["pid"]
        replica.ended = record["ended"] or ""
        if replica.state == "lost" and not replica.ended:
          replica.state = "starting"
        elif replica.state == "starting" and replica.ended:
          replica.state = "lost"
      case "abandon":
        self._counts["abandoned"] += 1
      case "stall":
        # A stall is reported repeatedly, and counts once for each step.
        self._counts["stalls"] += not self.stalled
        self.stall = record
      case "cannot_proceed":
        self.stall = record
      case "finish":
        self.finish = record

  def _commit(self, record: journal.Record) -> None:
    now = record["time"]
    if self._counts["steps"]:
      self._step_seconds.add(max(0.0, now - self.committed))
    self.step = record["step"] + 1
    self._counts["steps"] += 1
    self.committed, self.stall = now, None
    self._commits.append(now)
    skipped = record.get("skipped") or ()
    self._counts["skipped"] += sum(stop - start for start, stop in skipped)
    for member in record["members"]:
      replica = self._gradient(record, member)
      replica.accepted += member["count"]
      self.staleness.add(member["staleness"], member["count"])
      if member["age"] is not None:
        replica.waits += member["age"]
        replica.arrivals += 1

  def _gradient(
    self, record: journal.Record, gradient: journal.Record
  ) -> ReplicaNumbers:
    """The replica of a gradient, with the bytes that it moved since the last."""
    arrived = journal.arrived(record, gradient)
    when = record["time"] if arrived is None else arrived
    replica = self._seen(gradient["replica"], when)
    # The replica may have joined before these records begin.
    replica.state = replica.state or "in"
    replica.computed = gradient["compute"]
    timings = gradient.get("timings") or {}
    for direction in self._moved:
      self._moved[direction] += timings.get(f"bytes_{direction}") or 0
    return replica

  def _seen(self, name: Replica, when: float) -> ReplicaNumbers:
    replica = self._replica(name)
    replica.seen = max(replica.seen, when)
    return replica

  def _replica(self, name: Replica) -> ReplicaNumbers:
    return self.replicas.setdefault(name, ReplicaNumbers(name))

  @property
  def is_empty(self) -> bool:
    """Whether there was no record yet."""
    return self._written is None

  @property
  def silence(self) -> float:
    """Seconds since the last record; 0 before the first one, and at the end."""
    if self._written is None or self.finish is not None:
      return 0.0
    return max(0.0, time.monotonic() - self._written)

  def now(self) -> float:
    """Seconds since the run's start: now, or at its end."""
    return self.times.end + self.silence

  @property
  def commit_age(self) -> float:
    """Seconds since the last commit, or since the start; 0 at the end."""
    if self.is_empty or self.finish is not None:
      return 0.0
    began = self.run["time"] if self.run else 0.0
    return max(0.0, self.now() - max(began, self.committed))

  @property
  def stalled(self) -> float:
    """How long the present step has stalled; 0 if it goes on."""
    if self.finish is not None or self.stall is None:
      return 0.0
    waited: float = self.stall.get("waited", 0.0)
    return waited and waited + max(0.0, self.now() - self.stall["time"])

  def rate(self) -> float:
    """Steps per second, over the last commits."""
    until = self.now() if self.finish is None else self.committed
    return self._rate(until)

  def _rate(self, until: float) -> float:
    if len(self._commits) < 2:
      return 0.0
    return (len(self._commits) - 1) / max(until - self._commits[0], 1e-9)

  def trouble(self) -> str:
    """What the run waits for, as a sentence; "" if it makes progress."""
    quiet = self.commit_age
    usual = 1.0 / rate if (rate := self._rate(self.committed)) else 1.0
    if quiet < max(3.0, 5 * usual):
      return ""
    silence = self.silence
    if silence > max(_SILENT, 5 * usual):
      return (
        f"Nothing was written for {silence:.1f} s: the job is gone, or computes for"
        " that long."
      )
    replicas = missing(self.stall) if self.stall is not None else []
    if not replicas:
      # Only after `stall_warning` does the journal name the missing replicas.
      return f"No step for {quiet:.1f} s."
    names = ", ".join(map(str, replicas))
    return f"Waiting for replica {names}, for {quiet:.1f} s."

  def metrics(self) -> list[table.Number]:
    """The table of all numbers, now."""
    replicas = self.replicas.values()
    dropped: collections.Counter[str] = collections.Counter()
    for replica in replicas:
      dropped.update(replica.dropped)
    members = (
      0 if self.finish else sum(replica.state == "in" for replica in replicas)
    )
    values: dict[str, float | table.Distribution | Mapping[str, float]] = {
      "step": self.step,
      "steps": self._counts["steps"],
      "step_seconds": self._step_seconds,
      "staleness": self.staleness,
      "gradients_applied": sum(replica.accepted for replica in replicas),
      "gradients_dropped": dropped,
      "samples_skipped": self._counts["skipped"],
      "moved_bytes": self._moved,
      "stalls": self._counts["stalls"],
      "stalled_seconds": self.stalled,
      "commit_age_seconds": self.commit_age,
      "journal_age_seconds": self.silence,
      "rounds_abandoned": self.abandoned,
      "members": members,
      # The gradients of one that has ended well were counted.
      "failed": self.finish is not None and not self.finish.get("ledger"),
      "membership_changes": self._changes,
      "coordinator_restarts": self.restarts,
      "replica_seconds": self.times.booked(),
      "goodput_ratio": self.times.goodput().goodput,
    }
    return [
      table.Number(name, kind, text, values[name], _LABELS.get(name, ""))
      for kind, texts in _HELP.items()
      for name, text in texts.items()
    ]
