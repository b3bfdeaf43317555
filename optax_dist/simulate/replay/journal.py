"""Replays a recorded run on one machine, step by step, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from optax_dist.coordinator.journal import Record, segments

#: The state that the four functions below work with.
AnyState = Any


class Difference(NamedTuple):
  """The first difference between a replay and its journal.

  Attributes:
    step: commits applied up to it.
    replica: whose fingerprint differs.
    what: `"params"` or `"state"`.
    recorded: its fingerprint in the journal.
    replayed: its fingerprint in the replay.
  """

  step: int
  replica: int | str
  what: str
  recorded: str
  replayed: str


class Replay(NamedTuple):
  """The outcome of a replay.

  Attributes:
    steps: number of commits replayed.
    compared: number of steps with fingerprints in the journal.
    difference: the first difference, or None.
    state: the state at the end, or at the difference.
  """

  steps: int
  compared: int
  difference: Difference | None
  state: AnyState

  def __str__(self) -> str:
    apart = self.difference
    if apart is not None:
      return (
        f"step {apart.step}: {apart.what} of replica {apart.replica} differ,"
        f" recorded {apart.recorded}, replayed {apart.replayed}"
      )
    if not self.compared:
      return f"{self.steps} steps, no fingerprints in the journal to compare"
    if self.compared < self.steps:
      return (
        f"identical, {self.steps} steps, of which {self.compared} have"
        " fingerprints"
      )
    return f"identical, {self.steps} steps"


def replay(
  records: Sequence[Record],
  *,
  init: Callable[[], AnyState],
  gradient: Callable[[AnyState, Record], Any],
  aggregate: Callable[[Sequence[Any], Sequence[Record]], Any],
  apply: Callable[[AnyState, Any], AnyState],
  fingerprint: Callable[[AnyState], dict[str, str]],
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> Replay:
  """Replays the run of a journal, and compares fingerprints.

  Args:
    records: records from `journal.read`, of a run that aggregates gradients. If
      a job was resumed, steps that were lost are left out.
    init: creates the state before the first step (parameters, optimizer state).
    gradient: computes the gradient of a member of a commit, on the state of its
      `local_step`: the sum over its `batches`, or over the samples in `data`,
      in the same way as its replica.
    aggregate: the mean of the members' gradients, which are in replica order,
      given the journal's fields for each.
    apply: computes the state after a step with that mean.
    fingerprint: the state's fingerprints by name: `"params"`, `"state"`, or
      both.
    progress: called with the number of steps done, and in total.

  Returns:
    The outcome; the replay ends at the first difference.

  Raises:
    ValueError: the journal cannot be replayed: it is of another kind, lacks a
      step, or does not say on which batches a gradient was computed.

  Example:
    >>> records = [
    ...   {"kind": "run", "strategy": "sync_replicas", "step": 0},
    ...   {"kind": "commit", "step": 0, "members": [
    ...     {"replica": 0, "local_step": 0, "batches": [3]}]},
    ...   {"kind": "fingerprint", "step": 1, "replica": 0, "params": "2"},
    ... ]
    >>> print(replay(
    ...   records,
    ...   init=lambda: 5,
    ...   gradient=lambda state, member: sum(member["batches"]),
    ...   aggregate=lambda gradients, members: sum(gradients) / len(gradients),
    ...   apply=lambda state, mean: state - int(mean),
    ...   fingerprint=lambda state: {"params": str(state)},
    ... ))
    identical, 1 steps
  """
  first, commits, prints = _history(records)
  late = [
    commit["step"] - member["local_step"]
    for commit in commits
    for member in commit["members"]
  ]
  if min(late, default=0) < 0:
    raise ValueError("the journal has a gradient of a future step.")
  keep = 1 + max(late, default=0)
  state = init()
  states = {first: state}
  step, compared = first, 0
  apart = _compare(step, prints.get(step, ()), fingerprint(state))
  for commit in commits:
    if apart is not None:
      break
    gradients = [
      gradient(_state_of(states, member, step), member)
      for member in commit["members"]
    ]
    state = apply(state, aggregate(gradients, commit["members"]))
    step += 1
    states[step] = state
    states.pop(step - keep, None)
    recorded = prints.get(step, ())
    compared += bool(recorded)
    if recorded:
      apart = _compare(step, recorded, fingerprint(state))
    progress(step - first, len(commits))
  return Replay(step - first, compared, apart, state)


def _history(
  records: Iterable[Record],
) -> tuple[int, list[Record], dict[int, list[Record]]]:
  """The first step, commits without gaps, and fingerprints by step."""
  commits: list[Record] = []
  prints: dict[int, list[Record]] = {}
  first: int | None = None
  for part in segments(records):
    run = part[0]
    if run["kind"] != "run":
      raise ValueError("the journal does not begin with a run.")
    if run["strategy"] != "sync_replicas":
      raise ValueError(
        f"the journal is of {run['strategy']}, which has no commits to replay;"
        " only sync_replicas can be replayed."
      )
    begin = run["step"]
    if first is None:
      first = begin
    if not first <= begin <= first + len(commits):
      raise ValueError(
        f"the run goes on at step {begin}, but the journal has the steps from"
        f" {first} to {first + len(commits)}."
      )
    # Steps after the checkpoint were lost, and are repeated.
    del commits[begin - first :]
    prints = {step: found for step, found in prints.items() if step <= begin}
    for record in part:
      if record["kind"] == "fingerprint":
        prints.setdefault(record["step"], []).append(record)
      if record["kind"] != "commit":
        continue
      expected = first + len(commits)
      if record["step"] != expected:
        raise ValueError(
          f"the journal lacks the commit of step {expected}: the next one is of"
          f" step {record['step']}."
        )
      _check(record)
      commits.append(record)
  if first is None:
    raise ValueError("the journal is empty.")
  return first, commits, prints


def _check(commit: Record) -> None:
  for member in commit["members"]:
    if not (member.get("batches") or member.get("data")):
      raise ValueError(
        f"step {commit['step']}: the journal does not say on which batches"
        f" replica {member['replica']} computed."
      )


def _state_of(
  states: dict[int, AnyState], member: Record, step: int
) -> AnyState:
  try:
    return states[member["local_step"]]
  except KeyError:
    raise ValueError(
      f"step {step}: replica {member['replica']} computed on step"
      f" {member['local_step']}, which is before the journal."
    ) from None


def _compare(
  step: int, recorded: Iterable[Record], replayed: dict[str, str]
) -> Difference | None:
  for record in recorded:
    for what, value in replayed.items():
      known = record.get(what)
      if known is not None and known != value:
        return Difference(step, record["replica"], what, known, value)
  return None
