"""The data of a run that a table and the page show."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
from collections.abc import Iterable
from typing import Any

from optax_dist.cli.runs import journal_file
from optax_dist.cli.runs.journal_tail import Tail
from optax_dist.coordinator.metrics.run_numbers import RunNumbers, missing
from optax_dist.quorum.events import ordered

Record = dict[str, Any]

#: Seconds of the timeline, and limits on the other parts.
WINDOW = 60.0
STEPS = 240
EVENTS = 60

_EVENTS = {
  "run": "run started",
  "coordinator": "coordinator started",
  "join": "joined",
  "leave": "left",
  "lost": "lost",
  "stuck": "is evicted by its watchdog",
  "audit": "gradients differ",
  "stall": "waiting for",
  "cannot_proceed": "can't go on without",
  "process": "process",
  "abandon": "aggregation round abandoned",
  "gap": "the journal has a gap",
  "finish": "run ended",
}


class View:
  """The data shown from a growing journal.

  Attributes:
    tail: reads the journal.
    numbers: the numbers of the run.
    lock: for callers with several threads that read and show it.

  Example:
    >>> view = View("run.jsonl")
    >>> view.update([{"kind": "join", "replica": 0, "time": 1.0, "step": 0}])
    >>> [member["replica"] for member in view.state()["members"]]
    ['0']
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Names the journal, which need not exist yet."""
    self.tail = Tail(path)
    self.lock = threading.Lock()
    self.numbers = RunNumbers(keep=WINDOW)
    self._steps: collections.deque[tuple[float, float]] = collections.deque(
      maxlen=STEPS
    )
    self._events: collections.deque[dict[str, Any]] = collections.deque(
      maxlen=EVENTS
    )

  def read(self) -> None:
    """Reads new lines of the journal."""
    self.update(self.tail.read(), self.tail.age)

  @property
  def unwritten(self) -> str:
    """Why there is nothing to show, in words."""
    return journal_file.unwritten(self.tail.path)

  def update(self, records: Iterable[Record], age: float = 0.0) -> None:
    """Processes further records; see `RunNumbers.update`."""
    for record in records:
      before, committed = self.numbers.step, self.numbers.committed
      self.numbers.update([record], age)
      kind = record["kind"]
      if kind == "run":
        self._steps.clear()
      if self.numbers.step > before and committed:
        self._steps.append((record["time"], record["time"] - committed))
      if kind in _EVENTS and record.get("ended", kind):
        self._events.append(self._event(record))

  def state(self) -> dict[str, Any]:
    """The page's data as JSON types."""
    numbers = self.numbers
    now = numbers.now()
    return {
      "now": now,
      "window": WINDOW,
      "step": numbers.step,
      "rate": numbers.rate(),
      "strategy": numbers.run["strategy"] if numbers.run else "",
      "restarts": numbers.restarts,
      "trouble": self.unwritten if numbers.is_empty else numbers.trouble(),
      "ended": (numbers.finish or {}).get("reason") or "",
      "members": [
        dataclasses.asdict(replica)
        | {
          "replica": _name(replica.replica),
          "dropped": dict(replica.dropped.most_common()),
          "wait": replica.wait,
          "seen": max(0.0, now - replica.seen),
          "process": replica.process,
        }
        for replica in (numbers.replicas[r] for r in ordered(numbers.replicas))
      ],
      "spans": [
        span._asdict() | {"replica": _name(span.replica)}
        for span in self.numbers.times.spans()
        if span.end >= now - WINDOW
      ],
      "steps": list(self._steps),
      "events": list(self._events)[::-1],
      "goodput": self._goodput(),
    }

  def _goodput(self) -> dict[str, float] | None:
    """The share of each category in all replica-seconds; None without any."""
    goodput = self.numbers.times.goodput()
    return goodput.shares() if goodput.total else None

  def _event(self, record: Record) -> dict[str, Any]:
    text = _EVENTS[record["kind"]]
    if "replica" in record:
      text = f"replica {record['replica']} {text}"
    if record["kind"] == "process":
      text += f" {record['pid']} on {record['host']} {record['ended']}"
    if record.get("reason"):
      text += f": {record['reason']}"
    if record["kind"] in ("stall", "cannot_proceed"):
      names = ", ".join(map(str, missing(record)))
      text += f" replica {names}" if names else " others"
    replica = _name(record["replica"]) if "replica" in record else ""
    return {
      "time": record["time"],
      "kind": record["kind"],
      "replica": replica,
      "text": text,
    }


def _name(replica: object) -> str:
  return "" if replica is None else f"{replica}"
