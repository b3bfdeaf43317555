"""One replica of a run: the object that a training loop calls."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist import ledger, quorum
from optax_dist._internal import checks
from optax_dist.coordinator import (
  errors,
  leases,
  micro_batches,
  options,
  phases,
  preemption,
  strategies,
)
from optax_dist.coordinator import probe as probes
from optax_dist.coordinator.aggregation import encoder as encoders
from optax_dist.coordinator.aggregation import nodes, wire_formats
from optax_dist.coordinator.fingerprints import fingerprint
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import config, inputs
from optax_dist.coordinator.protocol.effects import Resolved
from optax_dist.coordinator.protocol.leader import audit
from optax_dist.coordinator.runtime import (
  agreement,
  driver,
  endpoint,
  journal_lines,
  states,
  timings,
  trees,
  update,
  watchdog,
)
from optax_dist.coordinator.runtime.processes import OneProcess, Processes
from optax_dist.coordinator.submission import Submission
from optax_dist.coordinator.transport.clock import AwakeClock

__all__ = ["Outcome", "Replica"]

_log = logging.getLogger("optax_dist.coordinator")

# Seconds in which replicas usually join: by then the first request to a store
# that does not answer has failed.
_JOINS_WITHIN = 6.0


class Replica:
  """One replica of a run; created by `join` and `run_embedded`.

  The parameters stay as they are between two calls of `step`, even though other
  replicas' commits go on in the background.

  Attributes:
    replica: its id.
    processes: the processes of the replica, of which this is one.
  """

  # Whether `step` takes `tokens`.
  _weighs_tokens = False
  # Whether the encoder adds the residual of a gradient to the next one.
  _encoder_feeds_back = True

  def __init__(
    self,
    place: endpoint.Endpoint,
    strategy: strategies.Strategy,
    params: Any,
    *,
    replica: quorum.Replica,
    settings: options.Options,
    opt_state: Any = None,
    global_step: int = 0,
    preempted: preemption.Preemption | None = None,
    on_close: Callable[[Replica], None] = lambda replica: None,
    on_stuck: Callable[[str], None] | None = None,
    processes: Processes | None = None,
    data: ledger.Batches | None = None,
    progress: ledger.Progress | None = None,
    probe: probes.Probe | None = None,
  ):
    self.replica = replica
    self._preempted, self._on_close = preempted, on_close
    self._strategy, self._settings = strategy, settings
    self.processes = processes or OneProcess()
    self._check(settings)
    global_step = checks.count("global_step", global_step, least=0)
    _check_data(strategy, data, progress, global_step)
    alone = isinstance(self.processes, OneProcess)
    if data is not None and data.audit and not alone:
      raise ValueError(
        "audit= compares gradients of replicas of one process: here each process"
        " has a part of them. Leave it out."
      )
    self._data_spec = data
    params = trees.as_params(params)
    shared = strategy.shared(params)
    if opt_state is not None:
      trees.check_like("opt_state", opt_state, shared.opt_state)
      shared = shared._replace(opt_state=opt_state)
    self._template = trees.Template(params)
    self._local: Any = strategy.local(shared)
    own = self._own()
    alike = agreement.agreement(strategy, shared, params, settings, data, own)
    parts = self.processes.parts(strategy, params, shared, settings.wire)
    shared = parts.shared
    self._update = update.Update(strategy, params, parts)
    feedback = settings.error_feedback if self._encoder_feeds_back else None
    fragments = strategy.fragment_sizes
    self._encoder = encoders.Encoder(
      self._update.blocks,
      settings.wire,
      feedback,
      mean_wire=self._mean_wire,
      mean_decay=settings.error_feedback,
      fragments=fragments,
    )
    nbytes = self._encoder.place.nbytes
    # Shards are exchanged however small they are: no process has the whole
    # gradient. Who averages inline gradients does not know their fragment.
    is_whole = self._encoder.mean_feedback is None or fragments is None
    fits = nbytes <= settings.inline_bytes
    self._inline = parts.gradient is None and is_whole and fits
    self._stopwatch = timings.Stopwatch()
    # Compiles the update early, so that no attempt has to wait for it.
    nothing = self._encoder.read(self._encoder.no_mean())
    members = strategy.quorum.replicas_to_aggregate
    self._update.apply(shared, nothing, members)
    self._indices: leases.Indices | None = None
    if data is not None:
      unit = data.unit(members)
      assert strategy.period is not None
      self._indices = leases.Indices(data, unit, strategy.period)
    add: Callable[[Any, Any], Any]
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self._slots: micro_batches.Slots | None = None
    window = 0
    if data is not None and data.deterministic:
      self._slots = micro_batches.Slots(data, data.indices)
      self._summing = nodes.Summing(self._encoder.place, data.slots)
      add, window = self._summing.add, data.global_batch
      alike += (("gradient of a probe", self._probed(probe, params)),)
    transport = place.transport
    own_place = transport.name, transport.address
    address, digest = self.processes.meet(own_place, fingerprint(shared))
    self._config = self._configure(
      transport.name,
      address,
      alike + parts.agreement,
      global_step,
      digest,
      ledger.Progress() if progress is None else progress,
    )
    self._driver = driver.Driver(
      self.processes.core(self._config),
      place,
      replica=replica,
      run=settings.run,
      encoder=self._encoder,
      initial=shared,
      step=global_step,
      apply=self._update.apply,
      inline=self._inline,
      journal=journal_lines.JournalLines(
        settings.journal,
        self._describe(),
      ),
      deadlines=settings.deadlines,
      processes=self.processes,
      shards=parts.state,
      own=own,
      data=data if window else None,
    )
    self._handover = self._driver.handover
    waits = strategy.policy is None
    self._submission = Submission(
      self._handover.published,
      add,
      max_staleness=strategy.quorum.max_staleness if waits else None,
      samples=0 if self._indices is None else self._indices.samples,
      window=window,
    )
    # The last step announced, and its state until the next outcome.
    self._saved = -1
    self._to_save: states.State | None = None
    self._closed = False
    # Memory for the next gradient; None: the event loop has it.
    self._buffer: memoryview | None = None
    self._lock = threading.RLock()
    self._on_stuck = on_stuck
    # Without a launcher to restart it, a process is ended only on request.
    ends = bool(settings.step_timeout or on_stuck)
    self._watchdog = watchdog.Watchdog(
      settings.steps,
      f"replica {replica}",
      self._driver.stalled,
      self._evict if ends else None,
    )

  def _check(self, settings: options.Options) -> None:
    """Refuses settings that this kind of replica can't use."""
    if settings.wire in wire_formats.FEW and not self._strategy.differences:
      raise ValueError(
        f"wire={settings.wire!r} is for what replicas have learned, and"
        f" {self._strategy.name!r} sends parameters, of which too little would be"
        " left. Use wire='int8', 'bfloat16' or 'float32'."
      )
    mean = settings.mean_wire
    if mean and wire_formats.feeds_back(mean) and not self._strategy.additive:
      raise ValueError(
        f"mean_wire={mean!r} is for means whose sum over the steps counts, and"
        f" {self._strategy.name!r} does not add them up as they are. Use"
        " mean_wire='bfloat16' or 'float32', or decoupled_diloco(merge='mean')."
      )

  def _probed(self, probe: probes.Probe | None, params: Any) -> str:
    """What a probe found; "" without one."""
    if probe is None:
      return ""
    assert self._slots is not None
    data = self._slots.data
    first = ((0, data.unit(data.slots)),)

    def update(start: Any, grads: Any) -> Any:
      leaves = jax.tree.leaves(self._template.fit(grads))
      arrays = [np.asarray(leaf) for leaf in leaves]
      return self._update.apply(self._strategy.shared(start), arrays, 1)

    return probes.result(probe, params, self._slots(first), update)

  @property
  def _mean_wire(self) -> str:
    """How means travel."""
    usual = wire_formats.mean_wire(self._settings.wire, self._strategy.additive)
    return self._settings.mean_wire or usual

  def _configure(
    self,
    process: str,
    address: str,
    alike: tuple[tuple[str, str], ...],
    step: int,
    digest: str,
    progress: ledger.Progress,
  ) -> config.Config:
    """The configuration of the protocol core."""
    strategy, settings, data = self._strategy, self._settings, self._data_spec
    return config.Config(
      process=process,
      replica=self.replica,
      address=address,
      agreement=alike,
      step=step,
      digest=f"{digest}-{progress}" if progress.next else digest,
      **strategy.quorum._asdict(),
      inline_bytes=self._encoder.place.nbytes if self._inline else None,
      alone=strategy.alone,
      timeout=settings.timeout,
      attempt_timeout=settings.attempt_timeout,
      leader_timeout=settings.leader_timeout,
      stall_warning=settings.stall_warning,
      fingerprint_every=settings.fingerprint_every,
      data=data,
      progress=progress,
      policy=strategy.policy,
    )

  def _describe(self) -> dict[str, Any]:
    numbers = self._strategy.quorum
    return {
      "strategy": self._strategy.name,
      **numbers._asdict(),
      "cores": _cores(),
      "weight": numbers.weight and "inverse_staleness",
      "wire": self._settings.wire,
      "mean_wire": self._mean_wire,
      "error_feedback": self._settings.error_feedback,
      "inline": self._inline,
      "gradient_bytes": self._encoder.place.nbytes,
      "data": None if self._data_spec is None else vars(self._data_spec),
      "config": dict(self._settings.config),
    }

  def start(self) -> Replica:
    """Asks to join, and waits until the replica is admitted.

    Raises:
      JoinRefused: the job differs in parameters, optimizer or strategy.
      RunFinished: the run has ended, and no replica is left to serve its final
        state. Otherwise the replica gets that state, and `finished` is True.
      CoordinatorError: there is no answer within `timeout` seconds.
    """
    seen = self._handover
    admitted = lambda: seen.admission > 0
    seconds = min(self._settings.stall_warning, _JOINS_WITHIN)
    try:
      self._driver.start()
      if self._preempted is not None:
        self._preempted.check()
      if not (seen.wait(admitted, seconds) or seen.is_over):
        # Only a leader reports stalls, and this replica may never reach one.
        _log.warning(
          "Replica %r has not joined the run after %.1f s. %s",
          *(self.replica, seconds, self._driver.missing()),
        )
      self._wait(admitted, "for admission to the run")
      self._resume()
    except BaseException:
      self.close()
      raise
    self._local = self._initial_local_state()
    self._begin()
    if self._settings.step_timeout != 0:
      self._watchdog.start()
    return self

  def _own(self) -> Any:
    """The local state to serve to a joining replica; None for none."""
    return None

  def _initial_local_state(self) -> Any:
    """The local state of this replica when it joins."""
    return self._strategy.local(self._shared)

  # Read by the training loop.

  @property
  def _shared(self) -> strategies.SharedState:
    """The state all replicas share, as of the last `step`."""
    return self._submission.base.get()

  @property
  def params(self) -> Any:
    """The parameters to compute the next gradient on: a tree of arrays."""
    return self._strategy.params(self._shared, self._local)

  @property
  def center(self) -> Any:
    """The state all replicas share, as of the last `step`."""
    return self._shared.params

  @property
  def opt_state(self) -> Any:
    """The shared state of the optimizer, as of the last `step`."""
    return self._shared.opt_state

  @property
  def global_step(self) -> int:
    """The number of committed steps that `params` includes."""
    return self._submission.base.step

  @property
  def is_stale(self) -> bool:
    """Whether a gradient on `params` would be dropped now.

    A training step in micro-batches can check between them, and `abandon`. If a
    replica has several processes, all of them check at the same points.
    """
    self._handover.sync()
    return self._submission.is_late(self._handover)

  @property
  def is_leader(self) -> bool:
    """Whether this process is the leader."""
    return self._handover.leads

  @property
  def failure(self) -> BaseException | None:
    """The error that ended this replica's part in the run; None for none."""
    return self._handover.failure

  @property
  def finished(self) -> bool:
    """Whether the run is over, or this replica has left it.

    If a replica has several processes, all of them check at the same points.
    """
    if not self._handover.left:
      self._handover.sync()
    return self._is_over()

  def _is_over(self) -> bool:
    return self._handover.left or self._has_finished()

  def _has_finished(self) -> bool:
    return self._handover.finished is not None

  @property
  def has_left(self) -> bool:
    """Whether this replica has left the run gracefully."""
    return self._handover.left

  def stats(self) -> dict[str, Any]:
    """Counts of this replica: gradients by outcome, bytes moved, rejoins."""
    return {
      "gradients": dict(self._submission.counts),
      **self._driver.stats(),
      "rejoins": max(0, self._handover.admission - 1),
    }

  def fingerprint(self) -> str:
    """A digest of the shared state: equal on all replicas at equal steps.

    In a replica of several processes each digests its own shards, equal to
    those of its counterpart in other replicas.
    """
    return fingerprint(self._shared)

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
      ...   found = []
      ...   for indices in replica.batches():
      ...     found.append(indices.tolist())
      ...     replica.step(jnp.ones(()))
      ...   return found, replica.global_step
      >>> coordinator.run_embedded(
      ...   train, 1, optax.sgd(0.1), jnp.zeros(()), data=data
      ... )
      [([[5, 2, 4, 0]], 1)]
    """
    yield from map(self._data("batches()"), self._drawn())

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
      ...   found = []
      ...   for slot in replica.micro_batches():
      ...     found.append((slot.step, slot.number, slot.indices.tolist()))
      ...     replica.step(jnp.ones(()))
      ...   return found
      >>> coordinator.run_embedded(
      ...   train, 1, optax.sgd(0.1), jnp.zeros(()), data=data
      ... )
      [[(0, 0, [4, 5]), (0, 1, [2, 3])]]
    """
    if self._slots is None:
      raise ValueError(
        "micro_batches() needs data=Batches(..., deterministic=True), given to"
        " join or run_embedded."
      )
    for spans in self._drawn():
      yield self._slots(spans)

  def _drawn(self) -> Iterator[ledger.Spans]:
    """The positions of the next gradient, until there are none."""
    while True:
      with self._one_thread():
        spans = self._draw()
      if spans is None:
        return
      yield spans

  def report_data(self) -> tuple[ledger.EpochReport, ...]:
    """What became of each epoch's samples, as of `params`, by index.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
    """
    data = self._data("report_data()").data
    return ledger.report(data, self.progress_at(self.global_step))

  def progress_at(self, step: int) -> ledger.Progress:
    """Which samples are in the steps before this one, for a checkpoint.

    Args:
      step: the step of `params`, or of `state_to_save`.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
      ValueError: the step is neither, and not among the latest either.
    """
    self._data("progress_at()")
    known = lambda: step in self._handover.progress
    latest = max(list(self._handover.progress), default=-1)
    comes = latest < step <= self._handover.published.step
    if not (known() or comes or step in self._held_steps()):
      raise ValueError(
        "progress_at(step) is for the step of `params`, now"
        f" {self.global_step}, or of `state_to_save`; got {step!r}, which is not"
        " known here (any more)."
      )
    self._wait(known, "to read what is committed")
    return self._handover.progress[step]

  def _held_steps(self) -> tuple[int, ...]:
    """The steps of `params` and `state_to_save`."""
    kept = self._to_save
    current = self._submission.base.step
    return (current,) if kept is None else (current, kept.step)

  @property
  def has_data(self) -> bool:
    """Whether samples are leased (`data` of `join`)."""
    return self._indices is not None

  def _data(self, what: str) -> leases.Indices:
    if self._indices is None:
      raise ValueError(
        f"{what} needs data=Batches(...), given to join or run_embedded."
      )
    return self._indices

  def _draw(self) -> ledger.Spans | None:
    """The samples of the next gradient, as soon as some are leased."""
    self._driver.check_process()
    submission, seen = self._submission, self._handover
    while True:
      if self._over(0) is not None and self.finished:
        return None
      spans = submission.draw(seen)
      if spans is not None:
        return spans
      if submission.ended is None:
        self._wait(
          lambda: submission.can_draw(seen), "for samples to compute on"
        )

  # Called by the training loop.

  def step(
    self, grads: Any, *, batch: Any = None, tokens: int | None = None
  ) -> Outcome:
    """Submits a gradient computed on `params`, and waits for its outcome.

    With `decoupled_diloco` it does not wait: it takes a step of the learner's
    own optimizer, and returns the outcome of an earlier contribution, if one is
    known.

    Args:
      grads: a tree of arrays like the parameters.
      batch: a JSON value that identifies the data of this gradient, for replay.
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
      TypeError, ValueError: the batch is not a JSON value.
      CoordinatorError: the run can't go on; every replica raises the same.
    """
    phases.slow_down(time.monotonic() - self._stopwatch.mark)
    if tokens is not None and (not self._weighs_tokens or tokens < 0):
      raise ValueError(
        "tokens= is what decoupled_diloco weighs by, an integer from 0; got"
        f" {tokens!r} with {self._strategy.name!r}."
      )
    with self._one_thread():
      outcome = self._step(grads, batch, 1 if tokens is None else int(tokens))
      return self._leave_if_preempted(self._announce(outcome))

  def _step(self, grads: Any, batch: Any, tokens: int) -> Outcome:
    phases.reach("computing", self.replica)
    self._driver.check_process()
    self._stopwatch.computed()
    self._handover.sync()
    over = self._over(1)
    if over is not None:
      return over
    grads = self._template.fit(grads)
    text = "null" if batch is None else _encode(batch)
    return self._advance(grads, text, tokens)

  def _advance(self, grads: Any, text: str, tokens: int) -> Outcome:
    """Adds a gradient, and submits the sum or round once it is complete."""
    submission, seen = self._submission, self._handover
    if self.has_data and submission.drawn is None:
      raise ValueError(
        "step() needs the samples of its gradient: iterate over batches()."
      )
    payload, self._local = self._strategy.contribute(
      self._shared, self._local, grads
    )
    zeros, work = 0, b""
    if self._slots is not None and submission.drawn is not None:
      spans = submission.drawn
      leaves = self._update.split(payload)
      payload = self._summing.encode(self._slots.number(spans), leaves)
      zeros = payload.zeros
      if self._slots.data.audited(spans):
        work = audit.pack(spans[0][0], payload.digest())
    submission.keep_drawn()
    if payload is not None:
      submission.add(seen, payload, text, self._stopwatch.take(), work)
    return (self._conclude() or self._outcome())._replace(zeros=zeros)

  def abandon(self) -> Outcome:
    """Gives up the gradient that is being computed, and catches up.

    For a training step in micro-batches that finds `is_stale`: `params` are
    current afterwards, and the rest of the computation is saved.
    """
    with self._one_thread():
      self._handover.sync()
      over = self._over(1)
      return self._announce(self._catch_up() if over is None else over)

  def _catch_up(self) -> Outcome:
    """Gives up the current computation."""
    submission, seen = self._submission, self._handover
    submission.abandon(seen)
    outcome = self._conclude()
    if outcome is None:
      self._begin()
    return outcome or self._outcome("abandoned")

  def wait_until_stale(self, timeout: float) -> bool:
    """Waits until the current gradient is stale, or the run ends.

    Returns:
      Whether that happened within `timeout` seconds.
    """
    late = lambda: self._submission.is_late(self._handover)
    found = self._handover.wait(late, timeout)
    return found or self._has_finished() or self._handover.failure is not None

  def save_soon(self) -> None:
    """Asks all replicas to save after a common step; see `Outcome.save`.

    Call it when this process is asked to stop (SIGTERM).
    """
    self._driver.feed(inputs.SaveWanted())

  def state_to_save(self) -> tuple[strategies.SharedState, int]:
    """The state to save now, and its step.

    From an `Outcome` with `save` until the next one it is the common step of
    all replicas. A slow replica may have passed that step without stopping
    there; it has kept its state nonetheless. Otherwise it is the state of
    `params`.
    """
    if self._to_save is not None:
      return self._to_save.get(), self._to_save.step
    return self._shared, self.global_step

  def finish(self, reason: str = "finished") -> None:
    """Ends the run gracefully, for all replicas.

    All replicas then have equal parameters; this one at once, others after
    `step`.

    Raises:
      CoordinatorError: it did not end within `timeout` seconds.
    """
    if not self.finished:
      self._raise_failure()
      self._driver.feed(inputs.FinishWanted(reason))
      self._wait(self._has_finished, "for the end of the run")
    if not self._handover.left and self._submission.expire(self._handover):
      self._go_on()

  def leave(self) -> None:
    """Takes this replica out of the run gracefully; the others go on.

    Raises:
      CoordinatorError: no acknowledgement came within `timeout` seconds.
    """
    if self.finished:
      return
    self._raise_failure()
    self._driver.feed(inputs.LeaveWanted())
    left = lambda: self._handover.left
    self._wait(left, "for the confirmation that it may leave")

  def _leave_if_preempted(self, outcome: Outcome) -> Outcome:
    """After SIGTERM: leaves, or has all replicas save first."""
    told = self._preempted
    if told is None or outcome.finished:
      return outcome
    if told.wants_save():
      self.save_soon()
    decided = bool(outcome.members or outcome.reason)
    leaves = told.is_time(
      save=outcome.save is not None,
      settled=decided and not self._submission.gradients,
    )
    if not self._handover.agree(leaves):
      return outcome
    self.leave()
    return outcome._replace(finished=True)

  def close(self) -> None:
    """Stops this replica's threads and waits; unsent messages are lost.

    In a forked child it does nothing: the replica belongs to the parent.
    """
    self._closed = True
    if self._driver.is_forked:
      return
    self._watchdog.close()
    self._driver.close()
    self._handover.close()
    self._on_close(self)

  def __enter__(self) -> Replica:
    return self

  def __exit__(
    self, kind: type | None, error: BaseException | None, trace: object
  ) -> None:
    try:
      if self._driver.is_forked:
        pass  # A child that was forked inside of the block has come to its end.
      elif kind is None:
        self.leave()
      elif self._handover.failure is None:
        # Tell the others, so that they need not wait for a timeout.
        self._driver.feed(inputs.Aborted(f"it has raised {error!r:.200}"))
    finally:
      self.close()

  # Helpers.

  @contextlib.contextmanager
  def _one_thread(self) -> Iterator[None]:
    """Refuses a second thread: it could get the first one's answer."""
    if not self._lock.acquire(blocking=False):
      raise RuntimeError(
        f"Two threads are using replica {self.replica!r} at once. A replica has"
        " one training loop: let one thread call step, abandon and batches."
      )
    try:
      yield
    finally:
      self._lock.release()

  def _watch(self, now: float) -> None:
    """Starts the watchdog for the next step, if there will be one."""
    if not self._is_over():
      self._watchdog.steps.begin(now)

  def _evict(self, reason: str, stacks: str) -> None:
    """Called by the watchdog: the training loop is stuck."""
    if self._is_over() or self._handover.failure is not None:
      return
    self._driver.evict(reason, stacks)
    if self._on_stuck is not None:
      self._on_stuck(reason)

  def _over(self, gradients: int) -> Outcome | None:
    """The outcome to return if nothing can be submitted any more."""
    self._raise_failure()
    submission = self._submission
    if self._handover.left:
      submission.count("finished", gradients)
      return self._outcome("finished", finished=True)
    concluded = self._conclude()
    if submission.expire(self._handover, gradients):
      return self._go_on()
    if concluded and gradients and not submission.gradients:
      # An interrupted call had left a sum; this gradient is as old.
      submission.end(self._handover, "stale", 1)
      return self._go_on()
    return None

  def _begin(self) -> None:
    """Starts or resumes timing the computation."""
    self._watch(self._stopwatch.begin(first=self._starts_submission()))

  def _starts_submission(self) -> bool:
    """Whether what is computed now is the first part of a submission."""
    return not self._submission.gradients

  def _submit(self, work: bytes = b"") -> None:
    """Submits the sum, or reports stale gradients."""
    self._settle()
    submission = self._submission
    finite, memory = True, None
    parts: Sequence[memoryview] = ()
    # Stale gradients are reported without their numbers.
    if self._slots is not None and submission.total is not None:
      parts = [array.data for array in submission.total.arrays]
    elif submission.total is not None:
      written = self._write(np.frombuffer(self._memory(), np.uint8))
      finite = written is not None
      if written is not None:
        parts, memory, self._buffer = written, self._buffer, None
    exchanged, seconds = self._driver.exchanged
    measured = self._stopwatch.submitted(
      seconds if exchanged == submission.sequence - 1 else 0.0,
      self._update.seconds,
      self._driver.moved(),
    )
    submitted = submission.submit(finite, b"", measured, work)
    self._driver.submit(submitted, memory, parts)
    self._watchdog.steps.submitted(time.monotonic())

  def _write(self, out: np.ndarray) -> list[memoryview] | None:
    """Encodes the next submission; see `Encoder.write`."""
    return self._encoder.write(
      self._update.split(self._submission.total),
      out,
      self._submission.sequence,
      extends=self._submission.partial,
      sizes=self._sizes(),
      in_place=self._stays_in_place(),
    )

  def _stays_in_place(self) -> bool:
    """Whether a gradient is sent from where it was computed.

    Between processes of one host it is copied once, into memory that both have.
    """
    return self._driver.is_far_from_some

  def _sizes(self) -> Sequence[int] | None:
    """How many numbers of each sent leaf are read; None for all."""
    return None

  def _memory(self) -> memoryview:
    """The buffer for the next gradient, also after an interrupted call."""
    if self._buffer is None:
      self._buffer = self._next_buffer()
    return self._buffer

  def _next_buffer(self) -> memoryview:
    patience = self._config.deadlines.replica
    clock = AwakeClock(2.0)
    end = clock.now() + patience
    while True:
      try:
        return self._handover.memory.get(timeout=1.0)
      except queue.Empty:
        self._raise_failure()
        if clock.now() > end:
          raise errors.CoordinatorError(
            f"Replica {self.replica!r} has waited {patience:.1f} s"
            " for memory for its gradient; its event loop hangs."
          ) from None

  def _conclude(self) -> Outcome | None:
    """Submits a complete sum and waits for its outcome; None without one.

    Also what a call that was interrupted has left.
    """
    submission, start = self._submission, time.monotonic()
    if submission.is_complete:
      self._submit()
    if submission.pending < 0:
      return None if submission.ended is None else self._go_on()
    self._wait_for_submission()
    waited = time.monotonic() - start
    submission.conclude(self._handover)
    return self._go_on()._replace(waited=waited)

  def _wait_for_submission(self) -> None:
    waits = lambda: self._submission.waits(self._handover)
    while what := waits():
      self._wait(lambda: waits() != what, what)

  def _go_on(self) -> Outcome:
    """Continues with the same sum, or with another one."""
    result, before = self._submission.ended, self._shared
    if result is None:
      self._begin()
      return self._outcome()
    self._settle()
    applied = result.applied
    self._stopwatch.take()  # What was computed of the next gradient is dropped.
    if applied is not None:
      before = self._handover.before(applied.sequence).get()
    self._wait_for_submission()
    self._resume()
    if result.forgets and result.reason not in ("", "finished"):
      self._local = self._strategy.forget(self._shared, self._local)
    else:
      self._local = self._strategy.settle(
        before, self._shared, self._local, mine=applied is not None
      )
    self._begin()
    if applied is None:
      return self._outcome(result.reason, finished=self._has_finished())
    return self._outcome(members=applied.members, staleness=applied.staleness)

  def _resume(self) -> None:
    """Continues from the current shared state."""
    # In this order: it may be readmitted in between.
    admission = self._handover.admission
    published = self._handover.published
    published.get()  # Waits until it is computed.
    self._submission.resume(admission, published)
    self._handover.forget(self._submission.sequence, self._held_steps())

  def _settle(self) -> None:
    """Keeps the residuals of submissions that counted."""
    while self._submission.settled:
      self._keep_residual(self._submission.settled.pop(0))

  def _keep_residual(self, resolved: Resolved) -> None:
    self._encoder.settle(resolved.sequence, resolved.counted)

  def _outcome(self, reason: str = "", **fields: Any) -> Outcome:
    return Outcome(not reason, reason, self.global_step, **fields)

  def _announce(self, outcome: Outcome) -> Outcome:
    """Announces once that the common step to save has been reached."""
    # Held before it is looked at: a newer one may replace it meanwhile.
    kept = self._to_save = self._handover.to_save
    if kept is None or not self._saved < kept.step <= self.global_step:
      self._to_save = None
      return outcome
    self._saved = kept.step
    return outcome._replace(save=kept.step)

  def _wait(self, ready: Callable[[], bool], what: str) -> None:
    """Waits, slightly longer than the core's own deadline."""
    patience = self._config.deadlines.replica + 1.0
    if self._closed and not ready():
      self._raise_failure()
    self._watchdog.steps.wait()
    if self._handover.wait(ready, patience):
      self._watch(time.monotonic())
      return
    self._raise_failure()
    if self._has_finished():
      return
    raise errors.CoordinatorError(
      f"Replica {self.replica!r} has waited {patience:.1f} s {what}."
      f" {self._driver.missing()}"
    )

  def _raise_failure(self) -> None:
    if self._handover.failure is not None:
      raise self._handover.failure
    if self._closed and not self._is_over():
      raise errors.CoordinatorError(
        f"Replica {self.replica!r} is closed: it takes no step after its `with`"
        " block. Join again for another one."
      )


def _check_data(
  strategy: strategies.Strategy,
  data: ledger.Batches | None,
  progress: ledger.Progress | None,
  step: int,
) -> None:
  """Refuses data that is none, or that the strategy can't use."""
  for name, value, kind in (
    ("data", data, ledger.Batches),
    ("progress", progress, ledger.Progress),
  ):
    if value is not None and not isinstance(value, kind):
      raise TypeError(f"{name} must be a {kind.__name__}, got {value!r:.100}.")
  if data is not None and strategy.period is None:
    raise ValueError(
      f"data= is not for the strategy {strategy.name!r}: a sample would be in"
      " several steps, one for each fragment. Each learner has data of its own"
      " there."
    )
  if data is not None and data.deterministic:
    _check_deterministic(strategy, data, progress or ledger.NOTHING_DONE, step)


def _check_deterministic(
  strategy: strategies.Strategy,
  data: ledger.Batches,
  progress: ledger.Progress,
  step: int,
) -> None:
  """Refuses what would make parameters depend on who computed what."""
  numbers = strategy.quorum
  for refused, what in (
    (
      numbers.max_staleness > 0,
      f"max_staleness={numbers.max_staleness}: what is stale depends on who is"
      " slow",
    ),
    (
      numbers.weight is not None,
      "staleness_weight: all micro-batches of a step count alike",
    ),
  ):
    if refused:
      raise ValueError(f"deterministic=True can't be combined with {what}.")
  if progress != ledger.Progress(step * data.global_batch):
    raise ValueError(
      f"deterministic=True needs the progress of its checkpoint: step {step}"
      f" begins at position {step * data.global_batch} of the data, and {progress}"
      " is done."
    )


def _cores() -> int | None:
  """The number of cores this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _encode(batch: Any) -> str:
  """A batch as JSON text, for the journal."""
  try:
    return _json.encode(batch)
  except ValueError as error:
    raise ValueError(f"batch must be a JSON value: {error}.") from None


def _plain(value: Any) -> Any:
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    return np.asarray(value).tolist()
  raise TypeError(
    f"batch must be a JSON value, got a {type(value).__name__} in it."
  )


_json = json.JSONEncoder(allow_nan=False, default=_plain)
