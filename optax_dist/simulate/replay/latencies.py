"""What a journal says of a run: latencies, strategy, pace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate import strategy as strategies
from optax_dist.simulate.latency.distributions import Empirical
from optax_dist.simulate.latency.hosts import PerHost
from optax_dist.simulate.strategy import Strategy

# Times in a journal are rounded to this.
_LEAST = 1e-6


class Recorded(NamedTuple):
  """A recorded run, in the simulator's terms.

  Attributes:
    latency: of each replica, as recorded: computing, and what it began later
      than `communication` says.
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
  turns = [turn for part in journal.segments(records) for turn in _turns(part)]
  if not turns:
    raise ValueError(
      "the journal has no times of computing: no commit, drop or exchange in it"
      " has a 'compute'."
    )
  after = [t.delay for t in turns if t.after_commit and t.delay is not None]
  communication = max(0.0, float(np.median(after))) if after else 0.0
  times: dict[Replica, list[float]] = {}
  for turn in turns:
    # What a replica was late beyond that is as if it had computed longer.
    late = max(0.0, (turn.delay or 0.0) - communication)
    each = max(_LEAST, (turn.compute + late) / turn.gradients)
    times.setdefault(turn.replica, []).extend([each] * turn.gradients)
  # Ids may be numbers and names.
  order = sorted(times, key=lambda r: (isinstance(r, str), r))
  hosts = [Empirical(times[replica]) for replica in order]
  return Recorded(
    PerHost(hosts),
    len(hosts),
    _strategy(runs[-1], records),
    communication,
    _pace(records),
  )


def _strategy(
  run: journal.Record, records: Sequence[journal.Record]
) -> Strategy:
  k = run.get("replicas_to_aggregate") or 1
  late = min(run.get("max_staleness") or 0, strategies.UNBOUNDED)
  if run["strategy"] == "elastic_average":
    # A time in the journal is that of a whole period.
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


class _Turn(NamedTuple):
  """One computation of a replica.

  Attributes:
    replica: its id.
    compute: seconds.
    gradients: that were summed in it.
    delay: seconds from what it follows until it began, as the leader saw it,
      messages included; None where that is not known.
    after_commit: whether it follows the last arrival of a step that the replica
      took part in, rather than a gradient that was dropped.
  """

  replica: Replica
  compute: float
  gradients: int
  delay: float | None
  after_commit: bool


def _turns(part: Sequence[journal.Record]) -> Iterator[_Turn]:
  """The computations of a run whose times are known."""
  # What each replica's next one follows: the least step, when, and a commit?
  follows: dict[Replica, tuple[int, float | None, bool]] = {}
  for record in part:
    gradients = []
    if record["kind"] == "commit":
      gradients = record["members"]
    elif record["kind"] in ("drop", "exchange"):
      gradients = [record]
    for one in gradients:
      replica, arrived = one["replica"], one.get("arrived")
      step, end, after_commit = follows.pop(replica, (0, None, False))
      compute, count = one.get("compute"), one.get("count", 1)
      if compute is not None and count > 0:
        delay = None
        known = end is not None and arrived is not None
        if known and one["local_step"] >= step:
          delay = arrived - compute - end
        yield _Turn(replica, compute, count, delay, after_commit)
      if record["kind"] == "drop" and arrived is not None:
        follows[replica] = record["step"], arrived, False
    ends = [m["arrived"] for m in gradients if m.get("arrived") is not None]
    if record["kind"] == "commit" and ends:
      for one in gradients:
        follows[one["replica"]] = record["step"] + 1, max(ends), True
    elif record["kind"] in ("join", "lost", "leave"):
      follows.pop(record["replica"], None)


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
