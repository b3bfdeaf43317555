"""What a journal says of a run: latencies, strategy, pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.rules.events import Replica
from optax_dist.simulate import strategy as strategies
from optax_dist.simulate.host_latencies import PerHost
from optax_dist.simulate.latency import Empirical
from optax_dist.simulate.strategy import Strategy

# Times in a journal are rounded to this.
_LEAST = 1e-6


class Recorded(NamedTuple):
  """A recorded run, in the simulator's terms.

  Attributes:
    latency: of each replica, as recorded.
    replicas: how many had a gradient.
    strategy: what they did.
    communication: seconds from the last arrival of a step until its members
      computed on; the median.
    steps_per_second: of the longest part of the run without a restart; None
      where it has fewer than two steps.
  """

  latency: PerHost
  replicas: int
  strategy: Strategy
  communication: float
  steps_per_second: float | None


def from_journal(records: Sequence[journal.Record]) -> Recorded:
  """Reads off a journal what the simulator needs.

  Work that was called off has no time (`compute` is null) and does not count.

  Args:
    records: of `journal.read`.

  Returns:
    The run.

  Raises:
    ValueError: there is no run in it, or no time of computing.
  """
  runs = [record for record in records if record["kind"] == "run"]
  if not runs:
    raise ValueError(
      "the journal has no record of kind 'run', so nothing says how many"
      " gradients make a step."
    )
  times = journal.latencies(records)
  if not times:
    raise ValueError(
      "the journal has no times of computing: no commit, drop or exchange in it"
      " has a 'compute'."
    )
  # Ids may be numbers and names.
  order = sorted(times, key=lambda r: (isinstance(r, str), r))
  hosts = [Empirical(np.maximum(times[r], _LEAST)) for r in order]
  return Recorded(
    PerHost(hosts),
    len(hosts),
    _strategy(runs[-1], records),
    _communication(records),
    _pace(records),
  )


def _strategy(
  run: journal.Record, records: Sequence[journal.Record]
) -> Strategy:
  k = run["replicas_to_aggregate"] or 1
  late = min(run["max_staleness"] or 0, strategies.UNBOUNDED)
  if run["policy"] == "elastic_average":
    # A time in the journal is that of a whole period.
    made = strategies.elastic_average(1)._replace(name="recorded: elastic")
    if k > 1:  # They exchange at the same time.
      made = made._replace(replicas_to_aggregate=k, max_staleness=late)
    return made
  drops = [r for r in records if r["kind"] == "drop"]
  cancel = bool(drops) and all(r["compute"] is None for r in drops)
  made = strategies.sync_replicas(k, max_staleness=late, cancel=cancel)
  kind: strategies.Kind = "gradient"
  if run["policy"] == "local_updates":
    kind = "change"
  return made._replace(name=f"recorded: {made.name}", kind=kind)


def _communication(records: Sequence[journal.Record]) -> float:
  """How long after the last arrival of a step its members computed on."""
  passed = []
  for part in journal.segments(records):
    ends: dict[Replica, tuple[int, float]] = {}
    for record in part:
      gradients = record.get("members", [record])
      if record["kind"] not in ("commit", "drop"):
        continue
      for one in gradients:
        step, end = ends.get(one["replica"], (-1, 0.0))
        if step == one["local_step"] and None not in (
          one["arrived"],
          one["compute"],
        ):
          passed.append(one["arrived"] - one["compute"] - end)
      if record["kind"] == "commit":
        arrived = [m["arrived"] for m in gradients if m["arrived"] is not None]
        if arrived:
          for one in gradients:
            ends[one["replica"]] = record["step"] + 1, max(arrived)
  return max(0.0, float(np.median(passed))) if passed else 0.0


def _pace(records: Sequence[journal.Record]) -> float | None:
  kinds = ("commit", "exchange")
  parts = [
    [r["time"] for r in part if r["kind"] in kinds]
    for part in journal.segments(records)
  ]
  times = max(parts, key=len)
  if len(times) < 2 or times[-1] <= times[0]:
    return None
  return (len(times) - 1) / (times[-1] - times[0])
