"""Replays a recorded run on one machine, step by step, to the last bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import ledger
from optax_dist.coordinator import strategies
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.aggregation.mean_feedback import MeanFeedback
from optax_dist.coordinator.fingerprints import fingerprint
from optax_dist.coordinator.journal import Record, batches, segments
from optax_dist.coordinator.strategies import SharedState
from optax_dist.ledger import tree


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
    state: parameters and optimizer state at the end, or at the difference.
  """

  steps: int
  compared: int
  difference: Difference | None
  state: SharedState

  def __str__(self) -> str:
    other = self.difference
    if other is not None:
      return (
        f"step {other.step}: {other.what} of replica {other.replica} differ,"
        f" recorded {other.recorded}, replayed {other.replayed}"
      )
    if not self.compared:
      return f"{self.steps} steps, no fingerprints in the journal to compare"
    if self.compared < self.steps:
      return (
        f"identical, {self.steps} steps, of which {self.compared} have"
        " fingerprints"
      )
    return f"identical, {self.steps} steps"


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
    if difference is not None:
      break
    encoded = [
      gradient
      for member in commit["members"]
      for gradient in exchange.encoded(_state_of(states, member, step), member)
    ]
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
  """Encodes and averages gradients as the replicas of a run did."""

  def __init__(
    self, run: Record, params: Any, gradient: Callable[[Any, Any], Any]
  ):
    leaves, self._treedef = jax.tree.flatten(params)
    self._gradient = gradient
    self._data: ledger.Batches | None = None
    if run.get("data"):
      self._data = ledger.Batches(**run["data"])
    self._wire = run.get("wire") or "float32"
    mean_wire = run.get("mean_wire") or wires.mean_wire(self._wire)
    decay = run.get("error_feedback")
    self._decay = 1.0 if decay is None else float(decay)
    self._place = layouts.layout(leaves, self._wire)
    self._mean_place = layouts.layout(leaves, mean_wire, like=self._place)
    # Inline gradients are averaged as a whole, all others in slices.
    self._inline = run.get("inline", False)
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    # What the wire formats left out, by its owner.
    self._of_gradients: dict[Any, np.ndarray] = {}
    self._of_means: dict[Any, MeanFeedback] = {}

  def encoded(self, state: SharedState, member: Record) -> list[np.ndarray]:
    """A member's gradient as it was sent; in a deterministic run, each slot's."""
    gradients = (
      self._gradient(state.params, batch)
      for batch in _batches(self._data, member)
    )
    if self._data is not None and self._data.deterministic:
      return [self._write(gradient, None) for gradient in gradients]
    error = None
    if wires.feeds_back(self._wire):
      # A replica's residual is added to its next gradient that counts.
      zeros = np.zeros(self._place.elements, np.float32)
      error = self._of_gradients.setdefault(_owner(member), zeros)
      error *= np.float32(self._decay)
    return [self._write(functools.reduce(self._add, gradients), error)]

  def _write(self, gradient: Any, error: np.ndarray | None) -> np.ndarray:
    out = np.zeros(self._place.nbytes, np.uint8)
    finite = means.write(jax.tree.leaves(gradient), self._place, out, error)
    # Only in a deterministic run do such gradients count: as zeros.
    return out if finite else np.zeros_like(out)

  def _order(
    self, members: Iterable[Record]
  ) -> Sequence[tuple[int, int]] | None:
    """In which order a deterministic run adds the slots of all members up."""
    data = self._data
    if data is None or not data.deterministic:
      return None
    rows = [
      (slot, slot + 1)
      for member in members
      # In the order in which they were computed, as the gradients are.
      for span in _spans(member)
      for start, stop in tree.slots(data, (span,))
      for slot in range(start, stop)
    ]
    return tree.whole(rows, data.slots)

  def mean(self, gradients: Sequence[np.ndarray], commit: Record) -> Any:
    """The mean of a step as each replica has received it."""
    members, place, mean_place = (
      commit["members"],
      self._place,
      self._mean_place,
    )
    out, order = np.zeros(mean_place.nbytes, np.uint8), self._order(members)
    cuts = place.cuts(1 if self._inline else len(members))
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
      # The owner of what this mean leaves out.
      feedback = self._of_means.setdefault(
        _owner(members[number]), MeanFeedback(place, self._decay)
      )
      error = feedback.owed(start, stop)
      low, high = place.bytes_of(start, stop)
      first, last = mean_place.bytes_of(start, stop)
      with np.errstate(all="ignore"):
        means.mean_slice(
          [raw[low:high] for raw in gradients],
          [member["weight"] for member in members],
          sum(member["count"] for member in members),
          place,
          mean_place,
          start,
          stop,
          out[first:last],
          error,
          feedback.gaps,
          order,
        )
      feedback.keep(start, error)
    return jax.tree.unflatten(self._treedef, means.read(mean_place, out))


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


def _compare(
  step: int, recorded: Iterable[Record], state: SharedState
) -> Difference | None:
  """The first fingerprint that is not that of the state."""
  for record in recorded:
    for what, value in (("params", state.params), ("state", state)):
      known, replayed = record.get(what), fingerprint(value)
      if known is not None and known != replayed:
        return Difference(step, record["replica"], what, known, replayed)
  return None


def _owner(member: Record) -> tuple[Any, Any]:
  """Whose it is: another life of the same replica begins with nothing."""
  return member["replica"], member.get("incarnation")


def _batches(data: ledger.Batches | None, member: Record) -> Sequence[Any]:
  """What each gradient of a sum was computed on."""
  if data is None or not member.get("data"):
    return batches(member)
  return np.split(data.indices(_spans(member)), member["count"])


def _spans(member: Record) -> ledger.Spans:
  """The samples of a member's gradient, as they were leased."""
  return tuple((start, stop) for start, stop in member["data"])
