"""Invariants of a run, whatever faults it had."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from optax_dist import ledger
from optax_dist.coordinator import journal
from tests.runs import samples


def check(
  records: Sequence[dict[str, Any]],
  reports: Iterable[tuple[int, int, dict[str, Any]]],
  timeout: float,
  data: ledger.Batches | None = None,
) -> tuple[int, list[str]]:
  """Checks a run.

  Args:
    records: the records of its journal.
    reports: from each process that exited normally: its replica, its
      incarnation, and its observations: ``calls`` and ``accepted`` (numbers of
      its gradients), ``reasons`` of dropped ones by number, ``prints`` by step,
      ``waited``, ``step`` and ``stats``; ``summed``, those in a sum of several
      that had not counted at the end; and ``undecided``, those in sums that
      went no further, of which a part may have counted.
    timeout: the timeout of the run; no replica may have waited longer.
    data: the leased data set, if there is one.

  Returns:
    The committed steps, and the violations.
  """
  reports = list(reports)
  problems: list[str] = []
  commits = [r for r in records if r["kind"] == "commit"]
  steps = [r["step"] for r in commits]
  if steps != list(range(len(steps))):
    problems.append(f"commits are not each once and in order: {_odd(steps)}")
  finals = {seen["step"] for _, _, seen in reports}
  if not reports:
    problems.append("nobody was there at the end")
  elif finals != {len(steps)}:
    problems.append(
      f"replicas ended at steps {sorted(finals)}, the journal at {len(steps)}"
    )
  problems += _prints(records, reports)
  problems += _ledger(commits, records, reports)
  if data is not None:
    problems += samples.check(data, commits, reports)
  for replica, _, seen in reports:
    if seen["waited"] > timeout:
      problems.append(f"replica {replica} has waited {seen['waited']:.1f} s")
    if seen["stats"]["pending"] > 64:
      problems.append(
        f"replica {replica} still holds {seen['stats']['pending']} offers"
      )
  return len(steps), problems


def in_order(records: Iterable[dict[str, Any]]) -> list[str]:
  """Checks that commits follow each other, from where the run began last.

  A run begins again if nobody has its state: then steps come once more.
  """
  problems: list[str] = []
  due: int | None = None
  for record in records:
    if record["kind"] == "run":
      due = record["step"]
    elif record["kind"] == "commit":
      if due not in (None, record["step"]):
        problems.append(f"commit {record['step']} comes where {due} is due")
      due = record["step"] + 1
  return problems


def nobody_removed(
  reports: Iterable[tuple[int, int, dict[str, Any]]],
) -> list[str]:
  """Checks that no live replica had to join again; see `check`."""
  return [
    f"replica {replica} was removed although it lived"
    for replica, _, seen in reports
    if seen["stats"]["rejoins"]
  ]


def _odd(steps: list[int]) -> str:
  counts = collections.Counter(steps)
  twice = [s for s, n in counts.items() if n > 1]
  missing = sorted(set(range(max(steps, default=-1) + 1)) - set(steps))
  return f"missing {missing}, twice {twice}"


def _prints(
  records: Sequence[dict[str, Any]], reports: Sequence[tuple[int, int, Any]]
) -> list[str]:
  """Checks that all hold equal states after each step."""
  by_step: dict[int, set[str]] = collections.defaultdict(set)
  for record in records:
    if record["kind"] == "fingerprint":
      by_step[record["step"]].add(record["state"])
  for _, _, seen in reports:
    for step, text in seen["prints"].items():
      by_step[int(step)].add(text)
  apart = [step for step, result in sorted(by_step.items()) if len(result) > 1]
  return [f"diverged: after steps {apart}"] if apart else []


def _ledger(
  commits: Sequence[dict[str, Any]],
  records: Sequence[dict[str, Any]],
  reports: Sequence[tuple[int, int, Any]],
) -> list[str]:
  """Checks that each gradient was applied once, dropped, or lost."""
  problems = []
  applied: collections.Counter[tuple[int, ...]] = collections.Counter()
  for commit in commits:
    for member in commit["members"]:
      late = commit["step"] - member["local_step"]
      if late != member["staleness"] or late < 0:
        problems.append(
          f"step {commit['step']}: the staleness in the journal is wrong"
        )
      for key in journal.batches(member):
        applied[tuple(key)] += 1
  twice = [key for key, n in applied.items() if n > 1]
  if twice:
    problems.append(f"gradients were applied twice: {twice[:5]}")
  for replica, incarnation, seen in reports:
    own = {key[2] for key in applied if key[:2] == (replica, incarnation)}
    believed = set(seen["accepted"])
    undecided = [*seen.get("undecided", []), *seen.get("summed", [])]
    # `lost` means that it isn't known to count (A7): a replica may be removed
    # when it has done its part of a step that is then committed.
    wrong = {
      number: reason
      for number in sorted(own.difference(believed, undecided))
      if (reason := seen["reasons"].get(str(number))) != "lost"
    }
    if wrong or believed - own:
      problems.append(
        f"replica {replica} takes {sorted(believed - own)[:5]} for applied,"
        f" the journal what it was told is {wrong}"
      )
    outcomes = len(seen["accepted"]) + len(seen["reasons"]) + len(undecided)
    if len(seen["calls"]) != outcomes:
      problems.append(f"replica {replica}: a gradient has no outcome")
    if "" in seen["reasons"].values():
      problems.append(
        f"replica {replica}: a gradient was dropped without reason"
      )
    counted = sum(seen["stats"]["gradients"].values())
    if counted != len(seen["calls"]):
      problems.append(
        f"replica {replica} counts {counted} gradients of {len(seen['calls'])}"
      )
  for record in records:
    if record["kind"] == "drop" and not record["reason"]:
      problems.append("the journal has a drop without a reason")
  return problems
