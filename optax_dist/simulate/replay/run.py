"""Replays a coordinator's run with the same code for means and updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

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
from optax_dist.coordinator.journal import Record
from optax_dist.simulate.replay.journal import Replay, replay


def replay_run(
  records: Sequence[Record],
  *,
  optimizer: optax.GradientTransformation,
  params: Any,
  gradient: Callable[[Any, Any], Any],
  opt_state: Any = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
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
    progress: called with the number of steps done, and in total.

  Returns:
    The outcome: the first step whose fingerprint differs, or none.

  Raises:
    ValueError: the journal cannot be replayed; it says why.
  """
  params = jax.tree.map(jnp.asarray, params)
  leaves, treedef = jax.tree.flatten(params)
  runs = [record for record in records if record["kind"] == "run"]
  run = runs[0] if runs else {}
  wire = run.get("wire") or "float32"
  mean_wire = run.get("mean_wire") or wires.mean_wire(wire)
  told = run.get("error_feedback")
  decay = 1.0 if told is None else float(told)
  place = layouts.layout(leaves, wire)
  mean_place = layouts.layout(leaves, mean_wire, like=place)
  # What is sent inline the leader averages, all else its members by slices.
  inline = run.get("inline", False)
  terms = {
    id(record["members"]): record.get("term")
    for record in records
    if record["kind"] == "commit"
  }
  # The quorum doesn't matter any more: the journal names the members.
  strategy = strategies.SyncReplicas(optimizer, strategies.Quorum(1, 1))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
  errors: dict[Any, np.ndarray] = {}
  owed: dict[Any, MeanFeedback] = {}

  def init() -> strategies.SharedState:
    shared = strategy.shared(params)
    return shared if opt_state is None else shared._replace(opt_state=opt_state)

  def encoded(state: strategies.SharedState, member: Record) -> np.ndarray:
    total = None
    for batch in _batches(runs[0], member):
      one = gradient(state.params, batch)
      total = one if total is None else add(total, one)
    out = np.zeros(place.nbytes, np.uint8)
    error = None
    if wires.feeds_back(wire):
      # A replica's residual is added to its next gradient that counts.
      zeros = np.zeros(place.elements, np.float32)
      error = errors.setdefault(_owner(member), zeros)
      error *= np.float32(decay)
    means.write(jax.tree.leaves(total), place, out, error)
    return out

  def mean(gradients: Sequence[np.ndarray], members: Sequence[Record]) -> Any:
    out = np.zeros(mean_place.nbytes, np.uint8)
    cuts = place.cuts(1 if inline else len(members))
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
      # Who keeps what this mean left out.
      owner = terms.get(id(members)) if inline else _owner(members[number])
      feedback = owed.setdefault(owner, MeanFeedback(place, decay))
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
          feedback.gaps(),
        )
      feedback.keep(start, error)
    whole = [0, mean_place.elements]
    scratch = np.empty(0, np.uint8)
    return jax.tree.unflatten(
      treedef, means.read(mean_place, [out], whole, scratch)
    )

  return replay(
    records,
    init=init,
    gradient=encoded,
    aggregate=mean,
    apply=lambda state, of: jax.block_until_ready(strategy.apply(state, of)),
    fingerprint=lambda state: {
      "params": fingerprint(state.params),
      "state": fingerprint(state),
    },
    progress=progress,
  )


def _owner(member: Record) -> tuple[Any, Any]:
  """Whose it is: another life of the same replica begins with nothing."""
  return member["replica"], member.get("incarnation")


def _batches(run: Record, member: Record) -> Sequence[Any]:
  """What each gradient of a sum was computed on."""
  if not member.get("data"):
    return member["batches"]
  data = ledger.Batches(**run["data"])
  spans = tuple((start, stop) for start, stop in member["data"])
  return np.split(data.indices(spans), member["count"])
