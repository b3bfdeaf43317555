"""What holds in a run with churn, whatever happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optax_dist import ledger
from optax_dist.ledger import spans as sp
from tests.churn.plans import STEPS
from tests.runs import checks as run_checks


def digests(
  found: Mapping[int, Iterable[str]], want: Mapping[int, str]
) -> list[str]:
  """Checks that all had the parameters and optimizer state of the undisturbed run.

  Args:
    found: the digests that replicas had after each step.
    want: the digest of an undisturbed run of one replica; empty: this is it.
  """
  problems = []
  if STEPS not in found:
    problems.append(f"no replica came to step {STEPS}")
  for step, some in sorted(found.items()):
    some = set(some)
    if len(some) > 1:
      problems.append(f"step {step}: replicas differ: {sorted(some)}")
    elif want and some != {want.get(step)}:
      problems.append(
        f"step {step}: {sorted(some)}, undisturbed {want.get(step)}"
      )
  return problems


def ends(done: Sequence[Mapping[str, int]], data: ledger.Batches) -> list[str]:
  """Checks that all that stayed came to the end of the data."""
  if not done:
    return ["no replica was there at the end"]
  return [
    f"a replica ended at step {one['step']}, with {one['next']} samples"
    for one in done
    if (one["step"], one["next"]) != (STEPS, STEPS * data.global_batch)
  ]


def slots(
  records: Iterable[Mapping[str, Any]], data: ledger.Batches, last: bool
) -> list[str]:
  """Checks that each sample was in exactly one slot of each step of a job.

  Args:
    records: of its journal, in order.
    data: its data.
    last: whether it came to its end; another one may lack its last lines.
  """
  records = list(records)
  problems = run_checks.in_order(records)
  commits = [r for r in records if r["kind"] == "commit"]
  steps = [commit["step"] for commit in commits]
  if last and steps[-1:] != [STEPS - 1]:
    problems.append(f"the journal ends with step {steps[-1:]}")
  for commit in commits:
    start = commit["step"] * data.global_batch
    window = ((start, start + data.global_batch),)
    spans = [tuple(s) for m in commit["members"] for s in m["data"] or ()]
    count = sum(member["count"] for member in commit["members"])
    whole = sp.union(spans) == window and sp.size(spans) == data.global_batch
    if not whole or count != data.slots:
      problems.append(
        f"step {commit['step']}: {count} slots with samples {spans}"
      )
  return problems
