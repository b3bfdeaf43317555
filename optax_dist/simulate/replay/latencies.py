"""What a journal says of a run: latencies, strategy, failures, pace, doubts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate import strategy as strategies
from optax_dist.simulate.engines.event_engine import Failures
from optax_dist.simulate.latency.recording import Recording
from optax_dist.simulate.network import Network
from optax_dist.simulate.replay import doubts, exchange, failures, turns
from optax_dist.simulate.strategy import Strategy

# Times in a journal are rounded to this.
_LEAST = 1e-6


class Recorded(NamedTuple):
  """A recorded run, in the simulator's terms.

  Attributes:
    latency: of each replica, as recorded: computing, and what it began later
      than `communication` says. Compiling is left out where it is known.
    replicas: how many had a gradient.
    strategy: what they did.
    communication: seconds from the last arrival of a step until its members
      computed on; the median.
    steps_per_second: of the longest part of the run without a restart, once
      all had begun; None where it has fewer than two steps.
    steps: how many that is of.
    failures: of replicas; None where there were none.
    faults: each of them, with its cause and length.
    doubts: why predictions from it may be wrong, a line each.
    exchange: how the communication grows with the bytes of a gradient; None
      where the journal does not tell.
  """

  latency: Recording
  replicas: int
  strategy: Strategy
  communication: float
  steps_per_second: float | None
  steps: int = 0
  failures: Failures | None = None
  faults: tuple[failures.Fault, ...] = ()
  doubts: tuple[str, ...] = ()
  exchange: exchange.Exchange | None = None

  def communication_of(
    self,
    members: int,
    nbytes: float | None = None,
    network: Network | None = None,
  ) -> float:
    """The communication of another step than those recorded.

    Args:
      members: replicas in a step.
      nbytes: of a gradient, as it is sent; None for the recorded ones.
      network: that links the replicas, where the recorded ones were on one host.

    Returns:
      Seconds.

    Raises:
      ValueError: the journal does not tell of bytes or of times.
    """
    if self.exchange is None:
      if nbytes is None and network is None:
        return self.communication
      raise ValueError(
        "the journal has no timings, or no bytes of a gradient: nothing tells how"
        " long another size, or another network, would take."
      )
    other = self.exchange.seconds(nbytes, members, network)
    return max(0.0, self.communication + other - self.exchange.seconds())


def from_journal(
  records: Sequence[journal.Record],
  others: Sequence[Sequence[journal.Record]] = (),
) -> Recorded:
  """Reads off a journal what the simulator needs.

  Work that was called off has no time (`compute` is null) and does not count.

  Args:
    records: of `journal.read`.
    others: of further journals with gradients of other sizes, over the same
      network: for `Recorded.exchange`, and nothing else.

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
  losses = [failures.of(part, usual) for part in parts]
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
    exchange.of(
      [
        (part, _communication(of_part))
        for part, of_part in zip(parts, found, strict=True)
      ]
      + [
        (part, _communication(list(turns.of(part))))
        for other in others
        for part in journal.segments(other)
      ]
    ),
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
      # What it began later, or earlier, than the simulation will have it begin.
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
  # Ids may be numbers and names.
  order = sorted(times, key=lambda r: (isinstance(r, str), r))
  rising = {r: np.argsort(starts[r], kind="stable") for r in order}
  return Recording(
    [np.array(starts[r])[rising[r]] for r in order],
    [np.array(times[r])[rising[r]] for r in order],
    np.sort(np.array(marks)),
  )


def _settled(part: Sequence[journal.Record]) -> list[float]:
  """Ends of steps once all replicas that are there early have begun."""
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
      members = record["members"] if record["kind"] == "commit" else (record,)
      for one in members:
        late.setdefault(one["replica"], step)
      step += record["kind"] != "drop"
  begun = max((late[r] for r in early if r in late), default=0)
  if begun > len(steps) / 2:  # Somebody came very late: that is no start.
    begun = 0
  return ends[begun:]


def _failures(found: Sequence[failures.Found], lowers: bool) -> Failures | None:
  faults = [fault for part in found for fault in part.faults]
  up = sum(part.up for part in found)
  if not faults or up <= 0:
    return None
  return Failures(
    len(faults) / up,
    tuple(fault.length for fault in faults),
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


def _pace(part: Sequence[journal.Record]) -> tuple[float | None, int]:
  """Steps per second once all had begun, and of how many steps."""
  times = _settled(part)
  passed = times[-1] - times[0] if times else 0.0
  if len(times) < 2 or passed <= 0 or not math.isfinite(passed):
    return None, max(0, len(times) - 1)
  return (len(times) - 1) / passed, len(times) - 1
