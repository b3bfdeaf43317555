"""Metrics of a run as a whole, counted from its journal's records."""

from __future__ import annotations

import collections

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


class RunNumbers:
  """Counts the records of a run's journal; a resumed run counts from its start.

  It uses no clock and no file: records in, metrics out.

  Attributes:
    step: committed steps of the model.
    finished: whether the run has ended.

  Example:
    >>> numbers = RunNumbers()
    >>> numbers.update({"kind": "run", "time": 0.0, "step": 0})
    >>> numbers.update({"kind": "join", "time": 0.1, "replica": 0, "step": 0})
    >>> numbers.metrics()["members"]
    {(): 1}
  """

  def __init__(self) -> None:
    """Starts before the first record."""
    self._begin(0)

  def _begin(self, step: int) -> None:
    self.step, self.finished = step, False
    self._steps = self._applied = self._abandoned = self._stalls = 0
    self._step_seconds = table.Distribution(_STEP_SECONDS)
    self._staleness = table.Distribution(_STALENESS)
    self._dropped: collections.Counter[str] = collections.Counter()
    self._members: set[Replica] = set()
    # Replicas that joined or left in these records; the others were there
    # before.
    self._known: set[Replica] = set()
    self._came = dict.fromkeys(("joined", "left", "lost"), 0)
    self._leader: Replica | None = None
    self._leader_changes = 0
    self._bytes_in = self._bytes_out = 0
    # Time of the last commit; and how long the current step has stalled.
    self._committed: float | None = None
    self._stalled = 0.0
    self._times = TimeLedger()

  def update(self, record: journal.Record) -> None:
    """Processes the next record."""
    match record["kind"]:
      case "commit":
        if record["step"] < self.step:
          return  # A new leader has repeated it.
        self._commit(record)
      case "drop":
        self._dropped[record["reason"]] += record["count"]
        self._move(record)
      case "exchange":
        self._applied += 1
      case "run":
        self._begin(record["step"])
      case "leader":
        leader = record["replica"]
        changed = self._leader is not None and self._leader != leader
        self._leader_changes += changed
        self._leader = leader
      case "join":
        self._members.add(record["replica"])
        self._known.add(record["replica"])
        self._came["joined"] += 1
      case "leave" | "lost" as kind:
        self._members.discard(record["replica"])
        self._known.add(record["replica"])
        self._came["left" if kind == "leave" else "lost"] += 1
      case "abandon":
        self._abandoned += 1
      case "stall":
        # It is reported repeatedly; one stall is one step that took too long.
        self._stalls += not self._stalled
        self._stalled = record["waited"]
      case "finish":
        self._stalled, self.finished = 0.0, True
        self._members.clear()
    self._times.update(record)

  def _commit(self, record: journal.Record) -> None:
    now = record["time"]
    self.step = record["step"] + 1
    self._steps += 1
    if self._committed is not None:
      self._step_seconds.add(max(0.0, now - self._committed))
    self._committed, self._stalled = now, 0.0
    for member in record["members"]:
      count = member["count"]
      self._applied += count
      self._staleness.add(member["staleness"], count)
      if member["replica"] not in self._known:
        self._members.add(member["replica"])
      self._move(member)

  def _move(self, gradient: journal.Record) -> None:
    """Counts the bytes that its replica moved since its last one."""
    timings = gradient.get("timings")
    if timings is not None:
      self._bytes_in += timings.get("bytes_in") or 0
      self._bytes_out += timings.get("bytes_out") or 0

  def metrics(self) -> table.Values:
    """All values, as of the last record."""
    only, by_label = table.only, table.by_label
    return {
      "step": only(self.step),
      "steps": only(self._steps),
      "step_seconds": only(self._step_seconds),
      "staleness": only(self._staleness),
      "gradients_applied": only(self._applied),
      "gradients_dropped": by_label(self._dropped),
      "moved_bytes": by_label({"in": self._bytes_in, "out": self._bytes_out}),
      "stalls": only(self._stalls),
      "stalled_seconds": only(self._stalled),
      "attempts_abandoned": only(self._abandoned),
      "members": only(len(self._members)),
      "membership_changes": by_label(self._came),
      "leader_changes": only(self._leader_changes),
      "replica_seconds": by_label(self._times.booked()),
      "goodput_ratio": only(self._times.goodput().goodput),
    }
