"""A run as its journal has it: latencies, strategy, failures, pace, doubts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate import doubts, turns
from optax_dist.simulate import faults as all_faults
from optax_dist.simulate import strategy as strategies
from optax_dist.simulate.engine import Failures
from optax_dist.simulate.recording import Recording
from optax_dist.simulate.strategy import Strategy

# Rounding of times in a journal.
_LEAST = 1e-6


class Recorded(NamedTuple):
  """A recorded run, in the simulator's terms.

  Attributes:
    latency: recorded latency of each replica: computing, and any delay of its
      start beyond `communication`. Compile time is left out if it is known.
    replicas: number of replicas that submitted a gradient.
    strategy: the recorded strategy.
    communication: seconds from the last arrival of a step until its members
      continued to compute; the median.
    steps_per_second: pace of the longest part of the run without a restart,
      once all replicas had begun; None if it has fewer than two steps.
    steps: number of steps in it.
    failures: failures of replicas; None if there were none.
    faults: each of them, with its cause and length.
    doubts: why predictions from it may be wrong, one line each.
  """

  latency: Recording
  replicas: int
  strategy: Strategy
  communication: float
  steps_per_second: float | None
  steps: int = 0
  failures: Failures | None = None
  faults: tuple[all_faults.Fault, ...] = ()
  doubts: tuple[str, ...] = ()


def from_journal(records: Sequence[journal.Record]) -> Recorded:
  """Extracts what the simulator needs from a journal.

  Aborted computations have no time (`compute` is null) and do not count.

  Args:
    records: the records from `journal.read`.

  Returns:
    The recorded run.

  Raises:
    ValueError: there is no run in it, or no computation time.
  """
  runs = [record for record in records if record["kind"] == "run"]
  if not runs:
    raise ValueError(
      "the journal has no record of kind 'run', so it does not say how many"
      " gradients make a step."
    )
  parts = [part for part in journal.segments(records) if part]
  found = [list(turns.of(part)) for part in parts]
  every = [turn for part in found for turn in part]
  if not every:
    raise ValueError(
      "the journal has no times of computing: no commit, drop or exchange in it"
      " has a 'compute'."
    )
  communication = _communication(every)
  latency = _recording(parts, found, communication)
  usual = float(np.percentile([turn.compute for turn in every], 95))
  losses = [all_faults.of(part, usual) for part in parts]
  paces = [_pace(part) for part in parts]
  pace, steps = max(paces, key=lambda pace: pace[1])
  strategy = _strategy(runs[-1], records)
  faults = tuple(fault for part in losses for fault in part.faults)
  return Recorded(
    latency,
    len(latency.latencies),
    strategy,
    communication,
    pace,
    steps,
    _failures(losses, bool(runs[-1].get("lower_on_loss"))),
    faults,
    doubts.of(records, every, faults, strategy.cancel),
  )


def _communication(found: Sequence[turns.Turn]) -> float:
  after = [t.delay for t in found if t.after_commit and t.delay is not None]
  return max(0.0, float(np.median(after))) if after else 0.0


def _recording(
  parts: Sequence[Sequence[journal.Record]],
  found: Sequence[Sequence[turns.Turn]],
  communication: float,
) -> Recording:
  starts: dict[Replica, list[float]] = {}
  times: dict[Replica, list[float]] = {}
  marks: list[float] = []
  offset = 0.0
  for part, of_part in zip(parts, found, strict=True):
    for turn in of_part:
      # How much later, or earlier, it began than the simulation assumes.
      late = 0.0
      if turn.delay is not None and turn.since is not None:
        expected = turn.since
        if turn.ready is not None:
          expected = max(expected, turn.ready + communication)
        late = turn.since + turn.delay - expected
      total = turn.compute + late
      each = max(_LEAST, total / turn.gradients)
      began = turn.arrived - total
      at = starts.setdefault(turn.replica, [])
      for i in range(turn.gradients):
        at.append(offset + began + i * each)
      times.setdefault(turn.replica, []).extend([each] * turn.gradients)
    marks += [offset + end for end in _settled(part)]
    offset += max((record["time"] for record in part), default=0.0)
  # Ids may be numbers or names.
  order = sorted(times, key=lambda r: (isinstance(r, str), r))
  rising = {r: np.argsort(starts[r], kind="stable") for r in order}
  return Recording(
    [np.array(starts[r])[rising[r]] for r in order],
    [np.array(times[r])[rising[r]] for r in order],
    np.sort(np.array(marks)),
  )


def _settled(part: Sequence[journal.Record]) -> list[float]:
  """Ends of steps after all initial replicas have begun."""
  ends = turns.ends(part)
  steps = [r for r in part if r["kind"] in ("commit", "exchange")]
  early: set[Replica] = set()
  late: dict[Replica, int] = {}
  step = 0
  for record in part:
    if record["kind"] == "join" and step < len(steps) / 4:
      early.add(record["replica"])
    elif record["kind"] in ("lost", "leave"):
      early.discard(record["replica"])
    elif record["kind"] in ("commit", "drop", "exchange"):
      for one in turns.contributions(record):
        late.setdefault(one["replica"], step)
      step += record["kind"] != "drop"
  begun = max((late[r] for r in early if r in late), default=0)
  if begun > len(steps) / 2:  # A very late join does not count.
    begun = 0
  return ends[begun:]


def _failures(
  found: Sequence[all_faults.Found], lowers: bool
) -> Failures | None:
  faults = [fault for part in found for fault in part.faults]
  up = sum(part.up for part in found)
  if not faults or up <= 0:
    return None
  return Failures(
    len(faults) / up,
    all_faults.downtimes(faults),
    tuple(fault.unnoticed for fault in faults),
    tuple(t for part in found for t in part.takeovers),
    lowers,
  )


def _strategy(
  run: journal.Record, records: Sequence[journal.Record]
) -> Strategy:
  k = run.get("replicas_to_aggregate") or 1
  late = min(run.get("max_staleness") or 0, strategies.UNBOUNDED)
  if run["strategy"] == "elastic_average":
    # A recorded time is that of a whole period.
    made = strategies.elastic_average(1)._replace(name="recorded: elastic")
    if k > 1:  # They exchange at the same time.
      made = made._replace(replicas_to_aggregate=k, max_staleness=late)
    return made
  drops = [r for r in records if r["kind"] == "drop"]
  cancel = bool(drops) and all(r.get("compute") is None for r in drops)
  made = strategies.sync_replicas(k, max_staleness=late, cancel=cancel)
  kind: strategies.Kind = "gradient"
  if run["strategy"] == "local_updates":
    kind = "change"
  return made._replace(name=f"recorded: {made.name}", kind=kind)


def _pace(part: Sequence[journal.Record]) -> tuple[float | None, int]:
  """Steps per second once all have begun, and over how many steps."""
  times = _settled(part)
  passed = times[-1] - times[0] if times else 0.0
  if len(times) < 2 or passed <= 0 or not math.isfinite(passed):
    return None, max(0, len(times) - 1)
  return (len(times) - 1) / passed, len(times) - 1
