"""Reasons why predictions from a journal may be wrong, one line each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate.computations import Computation
from optax_dist.simulate.losses import Loss

_FEW_STEPS = 30
_FEW_LOSSES = 10
# Utilization of a host's cores above which replicas slow each other down.
_BUSY = 0.8
# Other programs per core above which they determine how fast replicas are.
_LOADED = 2.0


def of(
  records: Sequence[journal.Record],
  computations: Sequence[Computation],
  losses: Sequence[Loss],
  cancelled: bool,
) -> tuple[str, ...]:
  """The doubts about predictions from a journal.

  Args:
    records: the records from `journal.read`.
    computations: its computations.
    losses: its losses of replicas.
    cancelled: whether computations were aborted.

  Returns:
    Lines for people; empty if there are no doubts.
  """
  lines = []
  steps = sum(r["kind"] in ("commit", "exchange") for r in records)
  if steps < _FEW_STEPS:
    lines.append(
      f"too short: {steps} steps, where {_FEW_STEPS} at least are needed to see"
      " how the times of computing vary"
    )
  counts: dict[Replica, int] = {}
  for computation in computations:
    counts[computation.replica] = counts.get(computation.replica, 0) + 1
  joined = {r["replica"] for r in records if r["kind"] == "join"}
  unknown = sorted(map(str, joined - set(counts)))
  if unknown:
    lines.append(
      f"no time of computing of replica {', '.join(unknown)}, which did join"
    )
  if any(computation.compiled is None for computation in computations):
    lines.append(
      "no timings: compiling can't be distinguished from computing, so the first times"
      " of each replica may be too long"
    )
  if 0 < len(losses) < _FEW_LOSSES:
    low, high = stats.chi2.ppf(
      [0.025, 0.975], [2 * len(losses), 2 * len(losses) + 2]
    )
    n = len(losses)
    which = "1 loss tells" if n == 1 else f"{n} losses tell"
    lines.append(
      f"too few failures: {which} the time between failures from"
      f" {2 * n / high:.2g} to {2 * n / low:.2g} times"
    )
  longest = max(losses, key=lambda loss: loss.length, default=None)
  if longest is not None and not longest.ended:
    lines.append(
      f"replica {longest.replica} was not back when the journal ended: it may be"
      f" away for longer than the {longest.length:.3g} s that were seen"
    )
  lines += _crowded(records)
  if cancelled:
    lines.append(
      "late replicas dropped their work at once, so how long it would have taken"
      " is not in it: slow computations are missing"
    )
  return tuple(lines)


def _crowded(records: Sequence[journal.Record]) -> list[str]:
  """Whether replicas compete for cores, with each other or with others."""
  cores = next(
    (r["cores"] for r in records if r["kind"] == "run" and r.get("cores")), None
  )
  if cores is None:
    return []
  lines = []
  host_of: dict[Replica, str] = {}
  shares: dict[Replica, list[float]] = {}
  for record in records:
    if record["kind"] == "join" and record.get("address"):
      host_of[record["replica"]] = record["address"].rpartition(":")[0]
    members = record["members"] if record["kind"] == "commit" else ()
    for member in members:
      timings = member.get("timings")
      if timings is not None and timings["sent"] > timings["start"]:
        share = timings["cpu"] / (timings["sent"] - timings["start"])
        shares.setdefault(member["replica"], []).append(share)
  by_host: dict[str, list[float]] = {}
  for replica, values in shares.items():
    if replica in host_of:
      mean = float(np.median(values))
      by_host.setdefault(host_of[replica], []).append(mean)
  busy = 0.0
  for host, used in by_host.items():
    # Threads of one process each report all of its CPU time.
    total = max(used) if host.startswith("in-process") else sum(used)
    busy = max(busy, total)
    if len(used) > 1 and total > _BUSY * cores:
      lines.append(
        f"outside the model: {len(used)} replicas on one host keep {total:.1f} of"
        f" its {cores} cores busy and slow each other; another number of them"
        " would compute at another speed"
      )
      break
  loads = [
    r["load"] for r in records if r["kind"] == "finish" and r.get("load")
  ]
  if loads and max(loads) - busy > _LOADED * cores:
    lines.append(
      f"outside the model: a load of {max(loads):.1f} on {cores} cores, most of it"
      " not the replicas'; with another load, all takes another time"
    )
  return lines
