"""Replays a recorded run on one machine, step by step, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import ledger
from optax_dist._internal import checks
from optax_dist.coordinator import strategies
from optax_dist.coordinator._internal.fingerprints import fingerprint
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.aggregation.reducer import Reducer
from optax_dist.coordinator.journal import Record, batches, segments
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.strategies import SharedState, hyperparams


class Replay(NamedTuple):
  """The outcome of a replay.

  Attributes:
    steps: number of commits replayed.
    compared: number of steps with fingerprints in the journal.
    difference: the first difference: the number of commits up to it, whose
      fingerprint differs, and how; "" if there is none.
    state: parameters and optimizer state at the end, or at the difference.
  """

  steps: int
  compared: int
  difference: str
  state: SharedState

  def __str__(self) -> str:
    return self.difference or (
      f"identical in {self.compared} of {self.steps} steps, which have"
      " fingerprints in the journal"
    )


def replay_run(
  records: Sequence[Record],
  *,
  optimizer: optax.GradientTransformation,
  params: Any,
  gradient: Callable[[Any, Any], Any],
  opt_state: Any = None,
) -> Replay:
  """Repeats on one machine what replicas of `coordinator.join` did.

  Parameters are equal bit for bit if this machine computes gradients as the
  replicas did: with the same program and version of JAX, on the same kind of
  device.

  Args:
    records: of the run's journal, `journal.read(path).records`.
    optimizer: as given to `join`.
    params: as given to `join`, the parameters before the first step.
    gradient: computes a gradient from parameters and the samples from
      `Replica.batches` that `Replica.step` used; in a run without leased
      samples, from parameters and the `batch` given to `step`.
    opt_state: as given to `join`.

  Returns:
    The outcome; the replay ends at the first difference. If a job was resumed,
    steps that were lost are left out.

  Raises:
    ValueError: the journal cannot be replayed: it is of another kind, lacks a
      step, or does not say on which batches a gradient was computed.
  """
  checks.kind("records", records, list | tuple, "the records of journal.read")
  checks.transformation("optimizer", optimizer)
  checks.function("gradient", gradient)
  first, commits, prints = _history(records)
  late = [
    commit["step"] - member["local_step"]
    for commit in commits
    for member in commit["members"]
  ]
  if min(late, default=0) < 0:
    raise ValueError("the journal has a gradient of a future step.")
  keep = 1 + max(late, default=0)
  params = jax.tree.map(jnp.asarray, params)
  # The quorum doesn't matter any more: the journal names the members.
  strategy = strategies.SyncReplicas(optimizer, strategies.Quorum(1, 1))
  state = strategy.shared(params)
  if opt_state is not None:
    state = state._replace(opt_state=opt_state)
  run = next(record for record in records if record["kind"] == "run")
  exchange = _Exchange(run, params, gradient)
  states = {first: state}
  step, compared = first, 0
  difference = _compare(step, prints.get(step, ()), state)
  for commit in commits:
    if difference:
      break
    encoded = [
      exchange.encoded(_state_of(states, member, step), member)
      for member in commit["members"]
    ]
    changes = commit.get("hyperparams") or {}
    state = hyperparams.change(state, changes)
    state = strategy.apply(state, exchange.mean(encoded, commit))
    state = jax.block_until_ready(state)
    step += 1
    states[step] = state
    states.pop(step - keep, None)
    recorded = prints.get(step, ())
    compared += bool(recorded)
    difference = _compare(step, recorded, state)
  return Replay(step - first, compared, difference, state)


class _Exchange:
  """Encodes and averages gradients with what the replicas of a run did it with."""

  def __init__(
    self, run: Record, params: Any, gradient: Callable[[Any, Any], Any]
  ):
    leaves, self._treedef = jax.tree.flatten(params)
    self._gradient = gradient
    self._data: ledger.Batches | None = None
    if run.get("data"):
      self._data = ledger.Batches(**run["data"])
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self._layout = layouts.layout(leaves, run.get("wire") or "float32")
    self._reducer = Reducer(self._layout)

  def encoded(self, state: SharedState, member: Record) -> np.ndarray:
    """A member's gradient as it was sent."""
    gradients = (
      self._gradient(state.params, batch)
      for batch in _batches(self._data, member)
    )
    out = np.zeros(self._layout.nbytes, np.uint8)
    total = functools.reduce(self._add, gradients)
    means.write(jax.tree.leaves(total), self._layout, out)
    return out

  def mean(self, gradients: Sequence[np.ndarray], commit: Record) -> Any:
    """The mean of a step as each replica has received it."""
    parts = [_part(member) for member in commit["members"]]
    # Where members averaged slices, the numbers are the same.
    mean = self._reducer.whole(parts, [raw.tobytes() for raw in gradients])
    return jax.tree.unflatten(self._treedef, means.read(self._layout, mean))


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
    if (run.get("data") or {}).get("deterministic"):
      raise ValueError(
        "the journal is of deterministic data: run the program again, with any"
        " number of replicas, and compare the fingerprints of its journal."
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
    prints = {s: printed for s, printed in prints.items() if s <= begin}
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
    if not (batches(member) or member.get("data")):
      raise ValueError(
        f"step {commit['step']}: the journal does not say on which batches"
        f" replica {member['replica']} computed."
      )


def _state_of(
  states: dict[int, SharedState], member: Record, step: int
) -> SharedState:
  try:
    return states[member["local_step"]]
  except KeyError:
    raise ValueError(
      f"step {step}: replica {member['replica']} computed on step"
      f" {member['local_step']}, which is before the journal."
    ) from None


def _compare(step: int, recorded: Sequence[Record], state: SharedState) -> str:
  """Describes a fingerprint that is not that of the state; or ""."""
  for what, value in (("params", state.params), ("state", state)):
    known = [record for record in recorded if record.get(what) is not None]
    replayed = fingerprint(value) if known else None
    for record in known:
      if record[what] != replayed:
        return (
          f"step {step}: {what} of replica {record['replica']} differ, recorded"
          f" {record[what]}, replayed {replayed}"
        )
  return ""


def _part(member: Record) -> entries.Part:
  """The part of a member's record that decides how its gradient is averaged."""
  return entries.Part(
    incarnation=-1,
    replica=member["replica"],
    sequence=-1,
    local_step=-1,
    staleness=-1,
    count=member["count"],
    weight=member["weight"],
    data=_spans(member),
  )


def _batches(data: ledger.Batches | None, member: Record) -> Sequence[Any]:
  """The batches that each gradient of a sum was computed on."""
  if data is None or not member.get("data"):
    return batches(member)
  return np.split(data.indices(_spans(member)), member["count"])


def _spans(member: Record) -> ledger.Spans:
  """The samples of a member's gradient, as they were leased."""
  return tuple((start, stop) for start, stop in member.get("data") or ())
