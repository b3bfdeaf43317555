"""A run as its journal has it: latencies, strategy, failures, pace, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist import quorum
from optax_dist._internal import checks
from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate import computations, warnings
from optax_dist.simulate import strategy as strategies
from optax_dist.simulate.computations import Computation
from optax_dist.simulate.engine import Failures
from optax_dist.simulate.losses import ROUNDING, Loss, downtimes, losses_in
from optax_dist.simulate.recording import Recording
from optax_dist.simulate.strategy import Strategy


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
    losses: each of them, with its length. Their number says how well the rate
      of failures is known.
    warnings: why its times may mislead, one line each.
  """

  latency: Recording
  replicas: int
  strategy: Strategy
  communication: float
  steps_per_second: float | None
  steps: int = 0
  failures: Failures | None = None
  losses: tuple[Loss, ...] = ()
  warnings: tuple[str, ...] = ()


def from_journal(records: Sequence[journal.Record]) -> Recorded:
  """Extracts what the simulator needs from a journal.

  Aborted computations have no time (`compute` is null) and do not count.

  Args:
    records: the records from `journal.read`.

  Returns:
    The recorded run.

  Raises:
    ValueError: there is no run in it, or no computation time, or it is of
      Decoupled DiLoCo.
  """
  checks.kind("records", records, list | tuple, "the records of journal.read")
  runs = [record for record in records if record["kind"] == "run"]
  if not runs:
    raise ValueError(
      "the journal has no record of kind 'run', so it does not say how many"
      " gradients make a step."
    )
  if any(run["strategy"] == "decoupled_diloco" for run in runs):
    raise ValueError(
      "the journal is of Decoupled DiLoCo, whose learners don't wait for steps:"
      " it can't be simulated."
    )
  parts = journal.segments(records)
  by_part = [list(computations.of(part)) for part in parts]
  every = [computation for part in by_part for computation in part]
  if not every:
    raise ValueError(
      "the journal has no times of computing: no commit or drop in it has a"
      " 'compute'."
    )
  communication = _communication(every)
  latency = _recording(parts, by_part, communication)
  usual = float(np.percentile([c.compute for c in every], 95))
  spans = [losses_in(part, usual) for part in parts]
  each = tuple(loss for losses, _ in spans for loss in losses)
  up = sum(seconds for _, seconds in spans)
  paces = [_pace(part) for part in parts]
  pace, steps = max(paces, key=lambda pace: pace[1])
  strategy = _strategy(runs[-1], records)
  return Recorded(
    latency,
    len(latency.seconds),
    strategy,
    communication,
    pace,
    steps,
    _failures(each, up, bool(runs[-1].get("lower_on_loss"))),
    each,
    warnings.of(records, every, strategy.cancel),
  )


def _communication(every: Sequence[Computation]) -> float:
  after = [c.delay for c in every if c.after_commit and c.delay is not None]
  return max(0.0, float(np.median(after))) if after else 0.0


def _recording(
  parts: Sequence[Sequence[journal.Record]],
  by_part: Sequence[Sequence[Computation]],
  communication: float,
) -> Recording:
  starts: dict[Replica, list[float]] = {}
  times: dict[Replica, list[float]] = {}
  marks: list[float] = []
  offset = 0.0
  for part, of_part in zip(parts, by_part, strict=True):
    for computation in of_part:
      # How much later, or earlier, the computation began than the simulation assumes.
      late = 0.0
      if computation.delay is not None and computation.since is not None:
        expected = computation.since
        if computation.ready is not None:
          expected = max(expected, computation.ready + communication)
        late = computation.since + computation.delay - expected
      total = computation.compute + late
      each = max(ROUNDING, total / computation.gradients)
      began = computation.arrived - total
      at = starts.setdefault(computation.replica, [])
      for i in range(computation.gradients):
        at.append(offset + began + i * each)
      times.setdefault(computation.replica, []).extend(
        [each] * computation.gradients
      )
    marks += [offset + end for end in _ends_once_all_began(part)]
    offset += max((record["time"] for record in part), default=0.0)
  # Ids may be numbers or names.
  order = sorted(times, key=lambda r: (isinstance(r, str), r))
  rising = {r: np.argsort(starts[r], kind="stable") for r in order}
  return Recording(
    [np.array(starts[r])[rising[r]] for r in order],
    [np.array(times[r])[rising[r]] for r in order],
    np.sort(np.array(marks)),
  )


def _ends_once_all_began(part: Sequence[journal.Record]) -> list[float]:
  """Ends of steps after all initial replicas have begun."""
  ends = computations.ends(part)
  early: set[Replica] = set()
  late: dict[Replica, int] = {}
  step = 0
  for record in part:
    if record["kind"] == "join" and step < len(ends) / 4:
      early.add(record["replica"])
    elif record["kind"] in ("lost", "leave"):
      early.discard(record["replica"])
    elif record["kind"] in ("commit", "drop"):
      for gradient in computations.contributions(record):
        late.setdefault(gradient["replica"], step)
      step += record["kind"] == "commit"
  begun = max((late[r] for r in early if r in late), default=0)
  if begun > len(ends) / 2:  # A very late join does not count.
    begun = 0
  return ends[begun:]


def _failures(
  losses: Sequence[Loss], up: float, lowers: bool
) -> Failures | None:
  if not losses or up <= 0:
    return None
  unnoticed = tuple(loss.unnoticed for loss in losses)
  return Failures(len(losses) / up, downtimes(losses), unnoticed, lowers)


def _strategy(
  run: journal.Record, records: Sequence[journal.Record]
) -> Strategy:
  k = run.get("replicas_to_aggregate") or 1
  late = min(run.get("max_staleness") or 0, quorum.UNBOUNDED)
  if run["strategy"] == "elastic_average":
    # A replica that exchanges alone may have any staleness.
    late = late if k > 1 else quorum.UNBOUNDED
    return Strategy(k, late, kind="elastic_average")
  drops = [r for r in records if r["kind"] == "drop"]
  cancel = bool(drops) and all(r.get("compute") is None for r in drops)
  made = strategies.sync_replicas(k, max_staleness=late, cancel=cancel)
  return made._replace(kind=run["strategy"])


def _pace(part: Sequence[journal.Record]) -> tuple[float | None, int]:
  """Steps per second once all have begun, and over how many steps."""
  times = _ends_once_all_began(part)
  passed = times[-1] - times[0] if times else 0.0
  if len(times) < 2 or passed <= 0 or not math.isfinite(passed):
    return None, max(0, len(times) - 1)
  return (len(times) - 1) / passed, len(times) - 1
