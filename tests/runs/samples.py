"""Invariants of runs with leases: which samples were in which step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from optax_dist import ledger
from optax_dist.coordinator import journal

# Samples per gradient, and full batches per epoch; some samples are left over.
_UNIT, _STEPS, _REST = 2, 4, 3


def batches(
  mode: Literal["exact", "streaming"], gradients: int
) -> ledger.Batches:
  """The data of a run: few samples, so that it takes several epochs.

  Args:
    mode: the mode of the epochs.
    gradients: gradients in a step.
  """
  batch = _UNIT * gradients
  return ledger.Batches(
    _STEPS * batch + _REST, batch, seed=7, epochs=None, mode=mode
  )


def plain(reports: Sequence[ledger.EpochReport]) -> list[Any]:
  """The result of `Replica.report_data`, as sent to the launcher."""
  return [
    [list(x) if isinstance(x, tuple) else x for x in dataclasses.astuple(one)]
    for one in reports
  ]


def check(
  data: ledger.Batches,
  commits: Sequence[dict[str, Any]],
  reports: Sequence[tuple[int, int, dict[str, Any]]],
) -> list[str]:
  """Checks that each sample was in one step of its epoch, or is named.

  Args:
    data: the data of the run.
    commits: the commits of the journal, in order.
    reports: see `checks.check`; with ``drawn``, the samples of each gradient by
      its number, and ``data``, the report of each epoch.

  Returns:
    The violations.
  """
  problems: list[str] = []
  progress = ledger.Progress()
  drawn = {(i, life): seen["drawn"] for i, life, seen in reports}
  for commit in commits:
    result: list[tuple[int, int]] = []
    for member in commit["members"]:
      spans = tuple((a, b) for a, b in member["data"] or ())
      samples = data.indices(spans).tolist()
      if len(samples) != _UNIT * member["count"]:
        problems.append(f"step {commit['step']}: a gradient on {samples}")
      result += spans
      keys = journal.batches(member)
      own = drawn.get((keys[0][0], keys[0][1])) if keys else None
      if own is None:
        continue  # It gave none of its own, or did not live to report.
      computed = [i for _, _, number in keys for i in own[str(number)]]
      if computed != samples:
        problems.append(
          f"step {commit['step']}: replica {keys[0][0]} computed on"
          f" {computed}, the journal says {samples}"
        )
    try:
      progress = progress.commit(result)
    except ValueError as error:
      problems.append(f"step {commit['step']}: {error}")
      progress = progress.with_(result)
  epochs = ledger.report(data, progress)
  problems += _epochs(data, epochs)
  for replica, _, seen in reports:
    if seen["data"] != plain(epochs):
      problems.append(
        f"replica {replica} reports {seen['data']}, by the journal it is "
        f"{plain(epochs)}"
      )
  return problems


def _epochs(
  data: ledger.Batches, epochs: Sequence[ledger.EpochReport]
) -> list[str]:
  problems = []
  for one in epochs:
    named = collections.Counter((*one.left_out, *one.skipped, *one.open))
    if one.committed + len(named) != data.num_samples or len(named) != (
      named.total()
    ):
      problems.append(f"epoch {one.epoch}: samples are missing: {one}")
    if one.skipped:
      problems.append(f"epoch {one.epoch}: samples are given up: {one}")
    # The next one begins when less than a step is left.
    late = data.mode == "exact" and one is not epochs[-1]
    if late and len(one.open) >= data.global_batch:
      problems.append(f"epoch {one.epoch} was left too early: {one}")
  return problems
