"""Reasons why predictions from a journal may be wrong, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate.computations import Computation
from optax_dist.simulate.losses import Loss

_FEW_LOSSES = 10


def of(
  records: Sequence[journal.Record],
  computations: Sequence[Computation],
  cancelled: bool,
) -> tuple[str, ...]:
  """The warnings about the times in a journal.

  Args:
    records: the records from `journal.read`.
    computations: its computations.
    cancelled: whether computations were aborted.

  Returns:
    Human-readable lines; empty if there are no warnings.
  """
  lines = []
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
  lines += _crowded(records)
  if cancelled:
    lines.append(
      "late replicas dropped their work at once, so how long it would have taken"
      " is not in it: slow computations are missing"
    )
  return tuple(lines)


def of_losses(losses: Sequence[Loss]) -> tuple[str, ...]:
  """The warnings about how often replicas fail, and for how long."""
  lines = []
  if 0 < len(losses) < _FEW_LOSSES:
    lines.append(
      f"too few failures: {len(losses)}, where {_FEW_LOSSES} at least are needed to"
      " tell how often they come"
    )
  longest = max(losses, key=lambda loss: loss.length, default=None)
  if longest is not None and not longest.ended:
    lines.append(
      f"replica {longest.replica} was not back when the journal ended: it may be"
      f" away for longer than the {longest.length:.3g} s that were seen"
    )
  return tuple(lines)


def _crowded(records: Sequence[journal.Record]) -> list[str]:
  """Whether programs compete for the cores of the coordinator's host."""
  cores = [r["cores"] for r in records if r.get("cores")]
  loads = [r["load"] for r in records if r.get("load")]
  if not cores or not loads or max(loads) <= cores[0]:
    return []
  return [
    f"outside the model: a load of {max(loads):.1f} on {cores[0]} cores, so"
    " programs slow each other; another number of replicas on a host, or another"
    " load, computes at another speed"
  ]
