"""One replica of a run: the object that a training loop calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from optax_dist import ledger
from optax_dist._internal import checks
from optax_dist.coordinator import errors, strategies
from optax_dist.coordinator._internal.fingerprints import fingerprint
from optax_dist.coordinator.data import micro_batches
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import messages
from optax_dist.coordinator.protocol.entries import Lineage
from optax_dist.coordinator.strategies import hyperparams
from optax_dist.coordinator.training import calls, preemption
from optax_dist.coordinator.training.participant import Participant

__all__ = ["Outcome", "Replica"]


class Replica:
  """One replica of a run; created by `join` and `run_embedded`.

  The parameters stay as they are between two calls of `step`, even though other
  replicas' commits go on in the background.

  Attributes:
    replica: its id.
    processes: the processes of the replica, of which this is one.
    has_data: whether samples are leased (`data` of `join`).
  """

  def __init__(
    self,
    participant: Participant,
    *,
    preempted: preemption.Preemption | None = None,
    tell: Callable[..., None] | None = None,
  ):
    """Creates a replica that has not joined its run yet.

    Args:
      participant: its part in the run.
      preempted: how it reacts to SIGTERM; None: not at all.
      tell: called with an event for the launcher, and its fields; None for no one.
    """
    self.replica = participant.replica
    self.processes = participant.driver.processes
    self.has_data = participant.samples.data is not None
    self._participant = participant
    if tell is not None:
      participant.tell = tell
    self._calls = calls.TrainingCalls(participant, preempted)

  def start(self, warm: bool = False) -> Replica:
    """Asks to join, and waits until the replica is admitted.

    Args:
      warm: whether it has compiled what it computes, and begins with the next step
        where the present one would not wait for it.

    Raises:
      JoinRefused: the job differs in parameters, optimizer or strategy.
      RunFinished: the run has ended, and no replica is left to serve its final
        state. Otherwise the replica gets that state, and `finished` is True.
      CoordinatorError: there is no answer within `timeout` seconds.
    """
    preempted = self._calls.preempted
    try:
      if preempted is not None:
        preempted.install()
      check = preempted.check if preempted else lambda: None
      self._participant.join(check)
    except BaseException:
      self.close()
      raise
    if preempted is not None:
      preempted.joined()
    process = self._participant.driver.process
    self._participant.tell("joined", step=self.global_step, process=process)
    self._calls.loop.begin(warm)
    if self._participant.settings.step_timeout != 0:
      self._participant.watchdog.start()
    return self

  def heed(self, preempted: preemption.Preemption) -> None:
    """Reacts to SIGTERM by another's handlers."""
    self._calls.heed(preempted)

  # Read by the training loop.

  @property
  def params(self) -> Any:
    """The parameters to compute the next gradient on: a tree of arrays."""
    participant = self._participant
    return self._calls.views.show(
      "params",
      participant.strategy.params(participant.shared, self._calls.loop.local),
    )

  @property
  def center(self) -> Any:
    """The state all replicas share, as of the last `step`."""
    return self._calls.views.show("center", self._participant.shared.params)

  @property
  def opt_state(self) -> Any:
    """The shared state of the optimizer, as of the last `step`."""
    return self._calls.views.show(
      "opt_state", self._participant.shared.opt_state
    )

  @property
  def inner_state(self) -> Any:
    """The state of this replica's own optimizer at its last exchange.

    With a strategy that trains locally; None with sync replicas. It is what goes
    with `state_to_save` into a checkpoint, and to replicas that join.
    """
    participant = self._participant
    state = participant.saving or participant.submission.base
    return self._calls.views.show("inner_state", state.inner)

  @property
  def global_step(self) -> int:
    """The number of committed steps that `params` includes."""
    return self._participant.submission.base.step

  @property
  def run_id(self) -> str:
    """Identifies the run: the same for all replicas, and new for each start."""
    return self._participant.inbox.joined.run_id

  @property
  def lineage(self) -> Lineage:
    """The runs that this run continues, the oldest first.

    For each: its `run_id`, and the step at which the next run began.
    """
    return self._participant.inbox.joined.lineage

  @property
  def is_stale(self) -> bool:
    """Whether a gradient on `params` would be dropped now.

    A training step in micro-batches can check between them, and `abandon`. If a
    replica has several processes, all of them check at the same points.
    """
    seen = self._participant.inbox
    seen.sync()
    return self._participant.submission.is_late()

  @property
  def failure(self) -> BaseException | None:
    """The error that ended this replica's part in the run; None for none."""
    return self._participant.inbox.failure

  @property
  def finished(self) -> bool:
    """Whether the run is over, or this replica has left it.

    Once the run is over, and the training loop knows, its parameters are the last
    ones. If a replica has several processes, all of them check at the same
    points.
    """
    return self._calls.finished()

  @property
  def preempted(self) -> bool:
    """Whether this process got SIGTERM, or a launcher's Ctrl-C.

    The next `step` leaves the run then (`on_sigterm` of `join`). A loop without
    `step`, such as an evaluation, looks here, and ends early.
    """
    return self._calls.preempted is not None and self._calls.preempted.look()

  @property
  def has_left(self) -> bool:
    """Whether this replica has left the run gracefully."""
    return self._participant.inbox.left

  def stats(self) -> dict[str, Any]:
    """Counts of this replica: gradients by outcome, bytes moved, rejoins."""
    return {
      "gradients": dict(self._participant.submission.counts),
      **self._participant.driver.stats(),
      "rejoins": self._participant.inbox.joined.rejoins,
    }

  def fingerprint(self) -> str:
    """A digest of the shared state: equal on all replicas at equal steps.

    In a replica of several processes each digests its own shards, equal to
    those of its counterpart in other replicas.
    """
    return fingerprint(self._participant.shared)

  # The data.

  def batches(self) -> Iterator[np.ndarray]:
    """Yields the samples to compute gradients on, until all data is used.

    Each item holds the indices of the samples of one gradient, and the next
    call is `step` with that gradient; samples without a gradient come again.
    `params` may be newer than before. When it ends, the run is over: each
    sample of each epoch is in exactly one committed step, except those named by
    `report_data`.

    Yields:
      int64 indices, from 0 to `num_samples` - 1.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
      CoordinatorError: the run can't go on.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_dist import coordinator
      >>> data = coordinator.Batches(num_samples=6, global_batch=4, seed=1)
      >>> def train(replica):
      ...   samples = []
      ...   for indices in replica.batches():
      ...     samples.append(indices.tolist())
      ...     replica.step(jnp.ones(()))
      ...   return samples, replica.global_step
      >>> coordinator.run_embedded(
      ...   train, 1, optax.sgd(0.1), jnp.zeros(()), data=data
      ... )
      [([[5, 2, 4, 0]], 1)]
    """
    data = self._participant.samples.needed_for("batches()")
    yield from map(data.indices, self._calls.leases())

  def micro_batches(self) -> Iterator[micro_batches.Slot]:
    """Yields the micro-batches to compute gradients on, until all data is used.

    For deterministic data. The next call is `step` with the gradient of the slot,
    computed on `params`, its samples and its key, and on nothing else. Like
    `batches`, but for what it yields.

    Raises:
      ValueError: `join` or `run_embedded` was given no deterministic `data`.
      CoordinatorError: the run can't go on.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_dist import coordinator
      >>> data = coordinator.Batches(6, 4, micro_batch=2, deterministic=True)
      >>> def train(replica):
      ...   slots = []
      ...   for slot in replica.micro_batches():
      ...     slots.append((slot.step, slot.number, slot.indices.tolist()))
      ...     replica.step(jnp.ones(()))
      ...   return slots
      >>> coordinator.run_embedded(
      ...   train, 1, optax.sgd(0.1), jnp.zeros(()), data=data
      ... )
      [[(0, 0, [4, 5]), (0, 1, [2, 3])]]
    """
    slots = self._participant.samples.slots
    if slots is None:
      raise ValueError(
        "micro_batches() needs data=Batches(..., deterministic=True), given to"
        " join or run_embedded."
      )
    for spans in self._calls.leases():
      yield slots(spans)

  def report_data(self) -> tuple[ledger.EpochReport, ...]:
    """What became of each epoch's samples, as of `params`, by index.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
    """
    data = self._participant.samples.needed_for("report_data()")
    return ledger.report(data, self.progress_at(self.global_step))

  def progress_at(self, step: int) -> ledger.Progress:
    """Which samples are in the steps before this one, for a checkpoint.

    Args:
      step: the step of `params`, or of `state_to_save`.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
      ValueError: the step is neither, and not among the latest either.
    """
    data = self._participant.samples.needed_for("progress_at()")
    seen = self._participant.inbox
    known = lambda: step in seen.progress
    latest = max(list(seen.progress), default=-1)
    comes = latest < step <= seen.published.step
    held = self._participant.held_steps
    if not (known() or comes or step in held):
      raise ValueError(
        "progress_at(step) is for the step of `params`, now"
        f" {self.global_step}, or of `state_to_save`; got {step!r}, which is not"
        " known here (any more)."
      )
    if not known():
      self._participant.wait(known, "to read what is committed")
      self._participant.watch()
    return dataclasses.replace(seen.progress[step], data=data)

  # Called by the training loop.

  def step(
    self, grads: Any, *, batch: Any = None, tokens: int | None = None
  ) -> Outcome:
    """Submits a gradient computed on `params`, and waits for its outcome.

    With `decoupled_diloco` it does not wait: it takes a step of the learner's
    own optimizer, and returns the outcome of an earlier contribution, if one is
    known.

    Args:
      grads: a tree of arrays like the parameters. NumPy's are copied. In a
        deterministic run, and if several gradients are summed, JAX's are read in
        later calls, too: don't donate them to a computation. If you keep no name for
        them, `step(gradient(params))`, their memory is free before the update needs
        some.
      batch: a JSON value that identifies the data of this gradient, for replay.
        Those of a step have at most 512 KiB together; `decoupled_diloco` leaves
        out what is longer.
      tokens: the number of tokens it was computed on, the weight in
        `decoupled_diloco`; by default all steps count alike.

    Returns:
      The outcome; `params` are then current.

    Raises:
      ValueError: the gradient's structure, shapes or dtypes differ from the
        parameters'.
      ValueError: samples are leased, and none was drawn from `batches`.
      ValueError: the tokens are negative, or the strategy does not weight by
        them.
      ValueError: the batch is not a JSON value, or too long a one.
      CoordinatorError: the run can't go on; every replica raises the same.
    """
    held = [grads]
    del grads
    return self._calls.step(held, batch, tokens)

  def abandon(self) -> Outcome:
    """Gives up the gradient that is being computed, and catches up.

    For a training step in micro-batches that finds `is_stale`: `params` are
    current afterwards, and the rest of the computation is saved.
    """
    return self._calls.abandon()

  def save_soon(self) -> None:
    """Asks all replicas to save after a common step; see `Outcome.save`.

    Call it when this process is asked to stop (SIGTERM).
    """
    self._participant.driver.enqueue(messages.Save())

  def set_hyperparams(self, **values: float) -> None:
    """Sets hyperparameters on all replicas, at the same step.

    They are those of `optax.inject_hyperparams` that are numbers and no schedules, in
    the shared `opt_state` and in the states of the replicas' own optimizers; of
    several with one name all are set. The first step to use them is the one that is
    committed next: the step of this replica's next gradient at the latest, or its
    next exchange. If several replicas set one at once, the last request that the
    coordinator has received counts, for all. It does not wait, and any thread may call
    it.

    Args:
      **values: numbers, by name.

    Raises:
      ValueError: there is no such hyperparameter, it follows a schedule or is no
        single number, or the value is not finite.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_dist import coordinator
      >>> def train(replica):
      ...   for _ in range(2):
      ...     replica.step(jnp.ones(()))
      ...     replica.set_hyperparams(learning_rate=0.5)
      ...   return float(replica.params)
      >>> opt = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
      >>> coordinator.run_embedded(train, 1, opt, jnp.zeros(()))
      [-1.5]
    """
    hyperparams.check(self._participant.shared, values)
    numbers = tuple((name, float(value)) for name, value in values.items())
    self._participant.driver.enqueue(messages.SetHyperparams(numbers))

  def state_to_save(self) -> tuple[strategies.SharedState, int]:
    """The state to save now, and its step.

    From an `Outcome` with `save` until the next one it is the common step of
    all replicas. A slow replica may have passed that step without stopping
    there; it has kept its state nonetheless. Otherwise it is the state of
    `params`.
    """
    kept = self._participant.saving
    if kept is not None:
      return kept.get(), kept.step
    return self._participant.shared, self.global_step

  def finish(self, reason: str = "finished") -> Outcome:
    """Ends the run gracefully, for all replicas.

    All replicas then have equal parameters; this one at once, others after
    `step`.

    Args:
      reason: for the journal, and for those who ask.

    Returns:
      The outcome with which it has ended, for `checkpoint.save_if_due`.

    Raises:
      CoordinatorError: it did not end within `timeout` seconds.
    """
    checks.kind("reason", reason, str, "a string")
    return self._calls.finish(reason)

  def leave(self) -> None:
    """Takes this replica out of the run gracefully; the others go on.

    Raises:
      CoordinatorError: no acknowledgement came within `timeout` seconds.
    """
    self._calls.leave()

  def close(self) -> None:
    """Stops this replica's threads and waits; unsent messages are lost.

    In a forked child it does nothing: the replica belongs to the parent.
    """
    self._participant.close()
    if self._participant.driver.loop.is_forked:
      return
    if self._calls.preempted is not None:
      self._calls.preempted.remove()
    if not self._participant.is_over and self.failure is not None:
      # A program that catches the error may exit with code 0.
      failure = self.failure
      final = "final" if getattr(failure, "final", False) else ""
      if isinstance(failure, errors.JoinRefused):
        final = "refused"
      if isinstance(failure, errors.RunFinished):
        final = "missed"
      self._participant.tell("failed", reason=str(failure), final=final)

  def __enter__(self) -> Replica:
    return self

  def __exit__(
    self, kind: type | None, error: BaseException | None, trace: object
  ) -> None:
    try:
      if self._participant.driver.loop.is_forked:
        pass  # A child that was forked inside of the block has come to its end.
      elif self._participant.closed:
        pass  # It has ended before, for instance at the end of the program.
      elif kind is None or (isinstance(error, SystemExit) and not error.code):
        self.leave()  # An exit with success is no failure either.
      elif self.failure is None:
        self._participant.lose(f"it has raised {error!r:.200}")
    finally:
      self.close()
