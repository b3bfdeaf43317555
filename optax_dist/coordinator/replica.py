"""One replica of a run: the object that a training loop calls."""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import secrets
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
  options,
  phases,
  preemption,
  strategies,
)
from optax_dist.coordinator.aggregation import encoder as encoders
from optax_dist.coordinator.aggregation import packing, wire_formats
from optax_dist.coordinator.fingerprints import fingerprint
from optax_dist.coordinator.metrics import replica_numbers, reporter
from optax_dist.coordinator.metrics.metric import Metric
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import config, effects, inputs
from optax_dist.coordinator.protocol.entries import Work
from optax_dist.coordinator.protocol.group import orders
from optax_dist.coordinator.protocol.group.companion import Companion
from optax_dist.coordinator.protocol.group.speaker import Speaker
from optax_dist.coordinator.protocol.node import Node as Core
from optax_dist.coordinator.runtime import (
  agreement,
  driver,
  endpoint,
  handover,
  journal_lines,
  shards,
  states,
  timings,
  trees,
  watchdog,
)
from optax_dist.coordinator.runtime import group as groups
from optax_dist.coordinator.transport.clock import AwakeClock

__all__ = ["Outcome", "Replica"]

_log = logging.getLogger("optax_dist.coordinator")

# Minimum size of a gradient to send while it is being written: 4 MB are
# written in half a millisecond, and alternating costs as much.
_LEAST = 8 << 20


class Replica:
  """One replica of a run; created by `join` and `run_embedded`.

  The parameters stay as they are between two calls of `step`, even though other
  replicas' commits go on in the background.

  Attributes:
    replica: its id.
    group: which process of the replica this is, if it has several.
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
    group: groups.Group | None = None,
    data: ledger.Batches | None = None,
    progress: ledger.Progress | None = None,
    metrics: reporter.Reporter | None = None,
  ):
    self.replica = replica
    self._preempted, self._on_close = preempted, on_close
    self._strategy, self._settings = strategy, settings
    self._check(settings, group)
    _check_data(strategy, data, progress)
    self._data_spec = data
    global_step = checks.count("global_step", global_step, least=0)
    params = trees.as_params(params)
    shared = strategy.shared(params)
    if opt_state is not None:
      trees.check_like("opt_state", opt_state, shared.opt_state)
      shared = shared._replace(opt_state=opt_state)
    self._template = trees.Template(params)
    self.group = group
    self._gradient_shards = state_shards = None
    self._update = strategy.apply
    self._local: Any = strategy.local(shared)
    own = self._own()
    alike = agreement.agreement(strategy, shared, params, settings, data, own)
    blocks: Any
    blocks, exchanged = jax.tree.flatten(strategy.exchanged(params))
    self._unflatten = functools.partial(jax.tree.unflatten, exchanged)
    if group is not None:
      alike += (("processes per replica", str(group.count)),)
      if not self._template.is_local:
        alike += shards.agreement(params)
        shared = shards.spread(shared, shards.mesh_of(params))
        self._update = jax.jit(
          strategy.apply,
          out_shardings=jax.tree.map(lambda x: x.sharding, shared),
        )
      shards.check_wire(params, settings.wire)
      self._gradient_shards = shards.LocalShards(jax.tree.leaves(params))
      state_shards = shards.LocalShards(jax.tree.leaves(shared))
      blocks = self._gradient_shards.templates
    feedback = settings.error_feedback if self._encoder_feeds_back else None
    fragments = strategy.fragment_sizes
    self._encoder = encoders.Encoder(
      blocks,
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
    self._inline = group is None and is_whole and fits
    self._compile(shared)
    transport = place.transport
    places, address, digest = self._meet(
      (transport.name, transport.address), fingerprint(shared)
    )
    self._config = self._configure(
      transport.name,
      address,
      alike,
      global_step,
      digest,
      ledger.Progress() if progress is None else progress,
    )
    self._driver = driver.Driver(
      self._core(places),
      transport,
      place.store,
      replica=replica,
      nonce=secrets.token_hex(16),
      prefix=endpoint.key_prefix(settings.run),
      use_run=place.use_run,
      encoder=self._encoder,
      initial=shared,
      step=global_step,
      apply=self._apply,
      inline=self._inline,
      journal=journal_lines.JournalLines(
        settings.journal,
        self._describe(),
        transport.silences,
        metrics,
      ),
      deadlines=settings.deadlines,
      of=group,
      local=state_shards,
      own=own,
    )
    self._handover = self._driver.handover
    self._leases: leases.Leases | None = None
    if data is not None:
      unit = data.unit(strategy.quorum.replicas_to_aggregate)
      assert strategy.period is not None
      self._leases = leases.Leases(data, unit, strategy.period, self._handover)
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self._pinned, self._based_on = shared, global_step
    self._admission = 0
    self._sequence = 0
    self._pending = self._taken = -1  # Sequences of submissions.
    self._total: Any = None
    # Gradients in the sum, and how many of those are not submitted yet.
    self._counted = self._unsent = 0
    self._batches: list[str] = []
    self._counts: dict[str, int] = {"applied": 0}
    # The last step announced, and its state until the next outcome.
    self._saved = -1
    self._to_save: states.State | None = None
    self._handover.held = self._held_steps
    self._left = self._closed = False
    self._in_use = _InUse(replica)
    self._computed = 0.0
    # When the current computation began; and, at that time, JAX's compile time
    # and the process's CPU time on all cores.
    self._began = self._token_time = time.monotonic()
    self._on_stuck = on_stuck
    # Without a launcher to restart it, a process is ended only on request.
    ends = bool(settings.step_timeout or on_stuck)
    self._watchdog = watchdog.Watchdog(
      settings.steps,
      f"replica {replica}",
      self._driver.stalled,
      self._give_up if ends else None,
    )
    self._compiled, self._cpu = timings.compiled(), time.process_time()
    # For the previous submission: when it was sent, and its times so far.
    self._sent: float | None = None
    self._waited = self._apply_time = 0.0
    self._waited_in_all, self._moved = 0.0, (0, 0)
    self._metrics = metrics
    if metrics is not None:
      metrics.add(self._numbers)

  def _check(
    self, settings: options.Options, group: groups.Group | None
  ) -> None:
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

  @property
  def _mean_wire(self) -> str:
    """How means travel."""
    usual = wire_formats.mean_wire(self._settings.wire, self._strategy.additive)
    return self._settings.mean_wire or usual

  def _meet(
    self, own: tuple[str, str], digest: str
  ) -> tuple[list[tuple[str, str]], str, str]:
    """Exchanges addresses and digests among the replica's processes.

    Args:
      own: name and address of this process.
      digest: fingerprint of its part of the shared state.

    Returns:
      The names and addresses of all processes, the replica's address, and a
      digest of all.
    """
    if self.group is None:
      return [own], own[1], digest
    told = self.group.gather(json.dumps([*own, digest]))
    found = [json.loads(text) for text in told]
    places = [(name, where) for name, where, _ in found]
    digest = orders.combined([theirs for _, _, theirs in found])
    return places, orders.join_places(places), digest

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
    numbers = strategy.quorum
    return config.Config(
      process=process,
      replica=self.replica,
      address=address,
      agreement=alike,
      step=step,
      digest=f"{digest}-{progress}" if progress.next else digest,
      replicas_to_aggregate=numbers.replicas_to_aggregate,
      total_num_replicas=numbers.total_num_replicas,
      max_staleness=numbers.max_staleness,
      weight=numbers.weight,
      lower_on_leave=numbers.lower_on_leave,
      lower_on_loss=numbers.lower_on_loss,
      inline_bytes=self._encoder.place.nbytes if self._inline else None,
      alone=strategy.alone,
      timeout=settings.timeout,
      attempt_timeout=settings.attempt_timeout,
      leader_timeout=settings.leader_timeout,
      stall_warning=settings.stall_warning,
      fingerprint_every=settings.fingerprint_every,
      data=data,
      progress=progress,
      exact=data is not None and data.constant_global_batch,
      fragments=strategy.rules,
    )

  def _core(self, places: Sequence[tuple[str, str]]) -> driver.Core:
    """The protocol core; with several processes, process 0 decides."""
    config, group = self._config, self.group
    if group is None:
      return Core(config)
    if not group.process:
      others = [name for name, _ in places[1:]]
      return Speaker(Core(config), others, patience=config.deadlines.replica)
    pause = config.deadlines.pace / 8
    return Companion(*places[0], pause=pause, patience=config.timeout)

  def _describe(self) -> dict[str, Any]:
    numbers = self._strategy.quorum
    return {
      "strategy": self._strategy.name,
      "replicas_to_aggregate": numbers.replicas_to_aggregate,
      "total_num_replicas": numbers.total_num_replicas,
      "max_staleness": numbers.max_staleness,
      "lower_on_leave": numbers.lower_on_leave,
      "lower_on_loss": numbers.lower_on_loss,
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

  def _compile(self, shared: Any) -> None:
    """Compiles the update early, so that no attempt has to wait for it."""
    nothing = self._encoder.no_mean()
    members = self._strategy.quorum.replicas_to_aggregate
    self._apply(shared, self._encoder.read(nothing), members)

  def _apply(self, shared: Any, leaves: Any, parts: int) -> Any:
    """The shared state after a commit; called by the event loop's thread."""
    start = time.monotonic()
    if self._gradient_shards is not None:
      leaves = self._gradient_shards.join(leaves)
    mean = self._unflatten(leaves)
    strategy = self._strategy
    # With sums, some replicas may have left.
    full = not strategy.sums or parts == strategy.quorum.replicas_to_aggregate
    try:
      found = self._update(shared, mean, *([] if full else [parts]))
    except (RuntimeError, ValueError) as error:
      trees.check_alive(shared, error)
      raise
    if not self._inline:
      # The buffer of a mean is reused, unless it came inline in a message.
      jax.block_until_ready(found)
    self._apply_time = time.monotonic() - start
    return found

  def start(self) -> Replica:
    """Asks to join, and waits until the replica is admitted.

    Raises:
      JoinRefused: the job differs in parameters, optimizer or strategy.
      RunFinished: the run has ended, and no replica is left to serve its final
        state. Otherwise the replica gets that state, and `finished` is True.
      CoordinatorError: there is no answer within `timeout` seconds.
    """
    warning = threading.Timer(
      min(self._settings.stall_warning, threading.TIMEOUT_MAX),
      self._warn_of_waiting,
    )
    warning.daemon = True
    try:
      self._driver.start()
      warning.start()
      if self._preempted is not None:
        self._preempted.check()
      self._wait(
        lambda: self._handover.admission > 0,
        "to be let in. If all replicas of the job have died, restart its store"
        " and resume from a checkpoint",
      )
      self._take_current()
    except BaseException:
      self.close()
      raise
    finally:
      warning.cancel()
    self._local = self._initial_local_state()
    self._begin()
    if self._settings.step_timeout != 0:
      self._watchdog.start()
    return self

  def _warn_of_waiting(self) -> None:
    """Only a leader reports stalls, and this replica may never reach one."""
    seconds, missing = self._settings.stall_warning, self._driver.missing()
    if not (self._closed or self._handover.admission):
      _log.warning(
        "Replica %r has waited %.1f s to be let in. Its event loop %s.",
        *(self.replica, seconds, missing),
      )

  def _own(self) -> Any:
    """The local state to serve to a joining replica; None for none."""
    return None

  def _initial_local_state(self) -> Any:
    """The local state of this replica when it joins."""
    return self._strategy.local(self._pinned)

  # Read by the training loop.

  @property
  def params(self) -> Any:
    """The parameters to compute the next gradient on: a tree of arrays."""
    return self._strategy.params(self._pinned, self._local)

  @property
  def center(self) -> Any:
    """The state all replicas share, as of the last `step`."""
    return self._pinned.params

  @property
  def opt_state(self) -> Any:
    """The shared state of the optimizer, as of the last `step`."""
    return self._pinned.opt_state

  @property
  def global_step(self) -> int:
    """The number of committed steps that `params` includes."""
    return self._based_on

  @property
  def is_stale(self) -> bool:
    """Whether a gradient on `params` would be dropped now.

    A training step in micro-batches can check between them, and `abandon`. If a
    replica has several processes, all of them check at the same points.
    """
    self._handover.sync()
    return self._is_late()

  def _is_late(self) -> bool:
    late = self._handover.published.step - self._based_on
    return late > self._strategy.quorum.max_staleness

  @property
  def is_leader(self) -> bool:
    """Whether this process is the leader."""
    return self._handover.leads

  @property
  def finished(self) -> bool:
    """Whether the run is over, or this replica has left it.

    If a replica has several processes, all of them check at the same points.
    """
    self._handover.sync()
    return self._left or self._has_finished()

  def _has_finished(self) -> bool:
    return self._handover.finished is not None

  @property
  def has_left(self) -> bool:
    """Whether this replica has left the run gracefully."""
    return self._left

  @property
  def metrics_url(self) -> str:
    """The URL of the Prometheus metrics; "" without `Options.metrics_port`."""
    return "" if self._metrics is None else self._metrics.url

  def stats(self) -> dict[str, Any]:
    """Counts of this replica: gradients by outcome, bytes moved, rejoins."""
    return {
      "gradients": dict(self._counts),
      **self._driver.stats(),
      "rejoins": self._driver.rejoins,
    }

  def _numbers(self) -> list[Metric]:
    """The metrics of this replica; any thread may call it."""
    bytes_in, bytes_out = self._driver.moved()
    return replica_numbers.metrics(
      self.replica,
      step=self._based_on,
      leads=self.is_leader,
      gradients=dict(self._counts),
      bytes_in=bytes_in,
      bytes_out=bytes_out,
      waited=self._waited_in_all,
      rejoins=self._driver.rejoins,
    )

  def fingerprint(self) -> str:
    """A digest of the shared state: equal on all replicas at equal steps.

    In a replica of several processes each digests its own shards, equal to
    those of its counterpart in other replicas.
    """
    return fingerprint(self._pinned)

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
    found = self._data("batches()")
    while True:
      with self._in_use:
        spans = self._draw(found)
      if spans is None:
        return
      yield found.indices(spans)

  def report_data(self) -> tuple[ledger.EpochReport, ...]:
    """What became of each epoch's samples, as of `params`, by index.

    Raises:
      ValueError: `join` or `run_embedded` was given no `data`.
    """
    data = self._data("report_data()").data
    return ledger.report(data, self.progress_at(self._based_on))

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
        f" {self._based_on}, or of `state_to_save`; got {step!r}, which is not"
        " known here (any more)."
      )
    self._wait(known, "to read what is committed")
    return self._handover.progress[step]

  def _held_steps(self) -> tuple[int, ...]:
    """The steps of `params` and `state_to_save`; the event loop calls it."""
    kept = self._to_save
    return (self._based_on,) if kept is None else (self._based_on, kept.step)

  @property
  def has_data(self) -> bool:
    """Whether samples are leased (`data` of `join`)."""
    return self._leases is not None

  def _data(self, what: str) -> leases.Leases:
    if self._leases is None:
      raise ValueError(
        f"{what} needs data=Batches(...), given to join or run_embedded."
      )
    return self._leases

  def _draw(self, found: leases.Leases) -> ledger.Spans | None:
    """The samples of the next gradient, as soon as some are leased."""
    self._driver.check_process()
    while True:
      if self._over(0) is not None and (self._left or self.finished):
        return None
      if self._pending >= 0:
        # A call of `step` was interrupted; its submission is resolved first.
        self._conclude(self._pending)
        continue
      self._account_for_prefetched()
      spans = found.draw(anew=self._unsent == 0)
      if spans is None:
        # A readmission or an outcome for part of its sum also ends the wait.
        admission = self._admission
        ready = lambda admission=admission: (
          found.ready
          or self._handover.admission != admission
          or self._has_outcome_of_taken()
        )
        self._wait(ready, "for samples to compute on")
        continue
      fresh = not self._counted and not found.round
      if fresh and self._handover.published.step > self._based_on:
        # Compute on the newest parameters.
        self._start_over("", 0)
        continue
      return spans

  def _has_outcome_of_taken(self) -> bool:
    return self._taken >= 0 and isinstance(
      self._handover.outcome(self._taken), handover.Outcome
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
    phases.slow_down(time.monotonic() - self._token_time)
    if tokens is not None and (not self._weighs_tokens or tokens < 0):
      raise ValueError(
        "tokens= is what decoupled_diloco weighs by, an integer from 0; got"
        f" {tokens!r} with {self._strategy.name!r}."
      )
    with self._in_use:
      outcome = self._step(grads, batch, 1 if tokens is None else int(tokens))
      return self._leave_if_preempted(self._announce(outcome))

  def _step(self, grads: Any, batch: Any, tokens: int) -> Outcome:
    phases.reach("computing", self.replica)
    self._driver.check_process()
    now = time.monotonic()
    self._computed += now - self._token_time
    self._token_time = now
    self._handover.sync()
    over = self._over(1)
    if over is not None:
      return over
    grads = self._template.fit(grads)
    text = "null" if batch is None else _encode(batch)
    return self._advance(grads, text, tokens)

  def _advance(self, grads: Any, text: str, tokens: int) -> Outcome:
    """Adds a gradient, and submits the sum or round once it is complete."""
    if self._pending >= 0:
      # An earlier call was interrupted; its submission is resolved first.
      self._conclude(self._pending)
      return self._start_over("stale")
    out = None if self._leases is None else self._leases.out
    if self._leases is not None and out is None:
      raise ValueError(
        "step() needs the samples of its gradient: iterate over batches()."
      )
    self._account_for_prefetched()
    payload, self._local = self._strategy.contribute(
      self._pinned, self._local, grads
    )
    if self._leases is not None:
      self._leases.out = out
      self._leases.submit()
    if payload is None:
      return self._outcome("", accepted=True)
    self._batches.append(text)
    if self._is_late():
      return self._report_stale(self._computed)
    self._total = (
      payload if self._total is None else self._add(self._total, payload)
    )
    self._counted += 1
    self._unsent += 1
    if self._wants_more():
      return self._outcome("", accepted=True)
    return self._conclude(*self._send(self._counted))

  def _wants_more(self) -> bool:
    """Whether more gradients are to be summed before submitting."""
    if self._leases is not None:
      return bool(self._leases.left)
    return self._unsent < self._handover.asked

  def abandon(self) -> Outcome:
    """Gives up the gradient that is being computed, and catches up.

    For a training step in micro-batches that finds `is_stale`: `params` are
    current afterwards, and the rest of the computation is saved.
    """
    with self._in_use:
      self._handover.sync()
      over = self._over(1)
      return self._announce(self._catch_up() if over is None else over)

  def _catch_up(self) -> Outcome:
    """Gives up the current computation."""
    if self._pending >= 0:
      self._conclude(self._pending)
    self._account_for_prefetched()
    if self._is_late():
      self._batches.append("null")
      # How long it would have taken is unknown.
      return self._report_stale(None)
    if not self._counted and self._handover.published.step > self._based_on:
      return self._start_over("abandoned")
    # The gradients already in the sum are still valid.
    self._count("abandoned", 1)
    self._begin()
    return self._outcome("abandoned")

  def wait_until_stale(self, timeout: float) -> bool:
    """Waits until the current gradient is stale, or the run ends.

    Returns:
      Whether that happened within `timeout` seconds.
    """
    found = self._handover.wait(self._is_late, timeout)
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
    return self._pinned, self._based_on

  def finish(self, reason: str = "finished") -> None:
    """Ends the run gracefully, for all replicas.

    All replicas then have equal parameters; this one at once, others after
    `step`.

    Raises:
      CoordinatorError: it did not end within `timeout` seconds.
    """
    if not self.finished and not self._left:
      self._raise_failure()
      self._driver.feed(inputs.FinishWanted(reason))
      self._wait(self._has_finished, "for the end of the run")
    if not self._left:
      self._start_over("finished", self._counted)

  def leave(self) -> None:
    """Takes this replica out of the run gracefully; the others go on.

    Raises:
      CoordinatorError: no acknowledgement came within `timeout` seconds.
    """
    if self._left or self.finished:
      return
    self._raise_failure()
    self._driver.feed(inputs.LeaveWanted())
    left = lambda: self._handover.left
    self._wait(left, "to be let go")
    self._left = True

  def _leave_if_preempted(self, outcome: Outcome) -> Outcome:
    """After SIGTERM: leaves, or has all replicas save first."""
    told = self._preempted
    if told is None or outcome.finished:
      return outcome
    if told.wants_save():
      self.save_soon()
    decided = bool(outcome.members or outcome.reason)
    leaves = told.is_time(
      save=outcome.save is not None, settled=decided and not self._counted
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

  def _watch(self, now: float) -> None:
    """Starts the watchdog for the next step, if there will be one."""
    if not (self._handover.left or self._has_finished()):
      self._watchdog.steps.begin(now)

  def _give_up(self, reason: str, stacks: str) -> None:
    """Called by the watchdog: the training loop is stuck."""
    if self._left or self._has_finished() or self._handover.failure is not None:
      return
    self._driver.give_up(reason, stacks)
    if self._on_stuck is not None:
      self._on_stuck(reason)

  def _over(self, gradients: int) -> Outcome | None:
    """The outcome to return if nothing can be submitted any more."""
    self._raise_failure()
    if self._left:
      self._count("finished", gradients)
      return self._outcome("finished", finished=True)
    if self._has_finished():
      return self._start_over("finished", self._counted + gradients)
    if self._handover.admission != self._admission:
      return self._handle_readmission(gradients)
    return None

  def _handle_readmission(self, gradients: int) -> Outcome | None:
    """It was declared dead and readmitted: its work so far is worthless."""
    self._pending = self._taken = -1
    self._encoder.lose()  # The outcome of what was in flight is unknown.
    return self._start_over("lost", self._counted + gradients)

  def _begin(self) -> None:
    """Starts or resumes timing the computation."""
    now = self._token_time = time.monotonic()
    self._watch(now)
    if self._sent is not None:
      self._waited += now - self._sent
      self._waited_in_all += now - self._sent
      self._sent = None
    if not self._counted and self._starts_submission():
      self._began = now
      self._compiled, self._cpu = timings.compiled(), time.process_time()

  def _starts_submission(self) -> bool:
    """Whether what is computed now is the first part of a submission."""
    return True

  def _timings(self, sequence: int, now: float, encoded: float) -> bytes:
    """The timings of a submission sent now, for the journal."""
    exchanged, seconds = self._driver.exchanged
    waited = self._waited
    before, self._moved = self._moved, self._driver.moved()
    made = timings.Timings(
      self._began,
      now,
      timings.compiled() - self._compiled,
      time.process_time() - self._cpu,
      encoded,
      waited,
      seconds if exchanged == sequence - 1 else 0.0,
      min(self._apply_time, waited),
      self._moved[0] - before[0],
      self._moved[1] - before[1],
    )
    self._sent, self._waited = now, 0.0
    return made.pack()

  def _send(self, total: int, work: Work | None = None) -> tuple[int, float]:
    """Submits the sum; returns its sequence number and the time."""
    memory, payload, writer = None, b"", None
    if self._inline:
      out = np.zeros(self._encoder.place.nbytes, np.uint8)
      finite = self._write(out)
      payload = out.tobytes() if finite else b""
    else:
      memory = self._memory()
      out = np.frombuffer(memory, np.uint8)
      leaves = self._to_pack()
      if leaves is None:
        finite = self._write(out)
      else:
        writer = self._encoder.packing(leaves, out)
        finite = writer is not None
      if not finite:
        self._handover.memory.put(memory)
        memory = None
    start = time.monotonic()
    sequence = self._say(
      self._computed,
      total,
      finite,
      payload,
      memory,
      self._taken,
      start,
      work,
      writer,
    )
    return sequence, start

  def _say(
    self,
    compute: float | None,
    total: int,
    finite: bool,
    payload: bytes,
    memory: memoryview | None,
    extends: int,
    now: float,
    work: Work | None = None,
    writer: packing.Packing | None = None,
  ) -> int:
    sequence = self._sequence
    self._sequence += 1
    self._pending = sequence
    used = self._batches if work is not None else self._batches[-total:]
    batches = f"[{','.join(used)}]"
    self._driver.submit(
      inputs.Submitted(
        sequence,
        extends,
        self._admission,
        self._based_on,
        total,
        finite,
        payload,
        sequence,
        batches,
        compute,
        self._timings(sequence, now, now - self._token_time),
        () if self._leases is None else self._leases.latest(total),
        work,
      ),
      memory,
      writer,
    )
    self._watchdog.steps.submitted(time.monotonic())
    return sequence

  def _write(self, out: np.ndarray) -> bool:
    """Encodes the next submission; returns whether all numbers are finite."""
    return self._encoder.write(
      self._to_send(),
      out,
      self._sequence,
      extends=self._taken,
      sizes=self._sizes(),
    )

  def _to_pack(self) -> list[Any] | None:
    """Lets the event loop write it in pieces; None: `_write` is called instead.

    While it writes a piece, the one before is on its way; between processes of
    one host a slice is lent as a whole, and nothing is won.
    """
    encoder = self._encoder
    if not (
      encoder.can_pack
      and encoder.place.nbytes >= _LEAST
      and self._driver.is_far_from_some
    ):
      return None
    leaves = self._to_send()
    # A NumPy array may change after an interrupted step.
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
      return None
    return leaves

  def _sizes(self) -> Sequence[int] | None:
    """How many numbers of each sent leaf are read; None for all."""
    return None

  def _to_send(self) -> list[Any]:
    """The part of the gradient that this process holds."""
    leaves = jax.tree.leaves(self._total)
    if self._gradient_shards is None:
      return leaves
    return self._gradient_shards.split(leaves)

  def _memory(self) -> memoryview:
    """A buffer for a gradient."""
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

  def _conclude(self, sequence: int, start: float | None = None) -> Outcome:
    """Waits for the answer to a submission, and continues from there."""
    start = time.monotonic() if start is None else start
    answered = lambda: self._handover.outcome(sequence) is not None
    self._wait(answered, "for this step's commit")
    answer = self._handover.take(sequence)
    self._pending = -1
    waited = time.monotonic() - start
    if isinstance(answer, effects.Taken):
      # It is buffered; the sum is submitted again with the gradients asked for.
      self._taken, self._unsent = sequence, 0
      self._begin()
      return self._outcome("", accepted=True, waited=waited)
    counted = self._counted
    if answer is not None and answer.resolved.apart:
      # The buffered part has its own outcome.
      decided = self._has_outcome_of_taken
      self._wait(decided, "for the commit of what was taken in")
      counted -= self._count_taken()
    if answer is None:
      return self._start_over("finished", counted, waited)
    resolved = answer.resolved
    self._settle(resolved)
    if resolved.reason == "stale" and not resolved.apart:
      # The next gradient on these parameters would be stale as well.
      old, admission = self._based_on, self._handover.admission
      newer = lambda: (
        self._handover.published.step > old
        or self._handover.admission > admission
      )
      self._wait(newer, "for newer parameters than its stale gradient's")
    if resolved.reason:
      return self._start_over(resolved.reason, counted, waited)
    self._count("applied", counted)
    self._clear()
    self._take_current()
    self._local = self._strategy.settle(
      answer.before.get(), self._pinned, self._local, mine=True
    )
    self._begin()
    return Outcome(
      True,
      "",
      self._based_on,
      resolved.members,
      resolved.staleness,
      waited=waited,
    )

  def _count_taken(self) -> int:
    """Counts buffered gradients that have an outcome; returns how many."""
    answer = self._handover.take(self._taken)
    self._taken = -1
    if not isinstance(answer, handover.Outcome):
      return 0
    self._settle(answer.resolved)
    sent = self._counted - self._unsent
    self._count(answer.resolved.reason or "applied", sent)
    return sent

  def _account_for_prefetched(self) -> None:
    """Counts buffered gradients whose outcome came while more were computed."""
    if not self._has_outcome_of_taken():
      return
    self._count_taken()
    # Gradients can't be removed from a sum.
    self._count("superseded", self._unsent)
    self._clear()

  def _settle(self, resolved: effects.Resolved) -> None:
    """Keeps a submission's residual if the submission counted."""
    self._encoder.settle(resolved.sequence, has_counted(resolved))

  def _report_stale(self, compute: float | None) -> Outcome:
    """Reports a gradient that is known to be stale to the leader."""
    count = self._unsent + 1
    now = time.monotonic()
    sequence = self._say(compute, count, True, b"", None, -1, now)
    answered = lambda: self._handover.outcome(sequence) is not None
    self._wait(answered, "for the answer to a stale gradient")
    self._handover.take(sequence)
    self._pending = -1
    return self._start_over("stale", self._counted + 1)

  def _count(self, reason: str, gradients: int) -> None:
    if gradients:
      self._counts[reason] = self._counts.get(reason, 0) + gradients

  def _clear(self) -> None:
    if self._taken >= 0:
      answer = self._handover.outcome(self._taken)
      if isinstance(answer, handover.Outcome):
        self._settle(answer.resolved)
    self._total, self._counted, self._unsent = None, 0, 0
    self._taken = -1
    self._computed = 0.0
    self._batches = []
    if self._leases is not None:
      self._leases.clear()

  def _take_current(self) -> None:
    """Continues from the current shared state."""
    if self._handover.suspended:
      # Every gradient on the state it has now would be worthless.
      self._wait(lambda: not self._handover.suspended, "to be let in once more")
    # In this order: it may be readmitted in between.
    self._admission = self._handover.admission
    published = self._handover.published
    self._pinned, self._based_on = published.get(), published.step

  def _start_over(
    self, reason: str, gradients: int = 1, waited: float = 0.0
  ) -> Outcome:
    """Drops what was computed, and continues from the current parameters."""
    self._count(reason, gradients)
    # Its samples are leased to others.
    forget = self._leases is not None and bool(
      self._leases.round or self._leases.drawn
    )
    self._clear()
    self._give_up_pending(reason)
    if reason == "finished":
      self._wait(self._has_finished, "for the end of the run")
      self._raise_failure()
    before = self._pinned
    self._take_current()
    if forget and reason != "finished":
      self._local = self._strategy.forget(self._pinned, self._local)
    else:
      self._local = self._strategy.settle(
        before, self._pinned, self._local, mine=False
      )
    self._begin()
    finished = self._has_finished()
    return self._outcome(reason, waited=waited, finished=finished)

  def _give_up_pending(self, reason: str) -> None:
    """Stops waiting for a submission that has no outcome yet."""

  def _outcome(
    self,
    reason: str,
    accepted: bool = False,
    finished: bool = False,
    waited: float = 0.0,
  ) -> Outcome:
    return Outcome(
      accepted,
      reason,
      self._based_on,
      finished=finished,
      waited=waited,
    )

  def _announce(self, outcome: Outcome) -> Outcome:
    """Announces once that the common step to save has been reached."""
    # Held before it is looked at: a newer one may replace it meanwhile.
    kept = self._to_save = self._handover.to_save
    if kept is None or not self._saved < kept.step <= self._based_on:
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
      f"Replica {self.replica!r} has waited {patience:.1f} s {what}. Its event "
      f"loop {self._driver.missing()}."
    )

  def _raise_failure(self) -> None:
    if self._handover.failure is not None:
      raise self._handover.failure
    if self._closed and not (self._left or self._has_finished()):
      raise errors.CoordinatorError(
        f"Replica {self.replica!r} is closed: it takes no step after its `with`"
        " block. Join again for another one."
      )


class _InUse:
  """Refuses a second thread: it could get the first one's answer.

  Attributes:
    thread: the one that is inside `step`, `abandon` or `batches`; None: none is.
  """

  __slots__ = ("_replica", "thread")

  def __init__(self, replica: quorum.Replica):
    self._replica = replica
    self.thread: int | None = None

  def __enter__(self) -> None:
    me = threading.get_ident()
    if self.thread not in (None, me):
      raise RuntimeError(
        f"Two threads are using replica {self._replica!r} at once. A replica has"
        " one training loop: let one thread call step, abandon and batches."
      )
    self.thread = me

  def __exit__(self, *error: object) -> None:
    self.thread = None


def _check_data(
  strategy: strategies.Strategy,
  data: ledger.Batches | None,
  progress: ledger.Progress | None,
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
  if (
    data is not None
    and data.constant_global_batch
    and strategy.name != "sync_replicas"
  ):
    raise ValueError(
      "constant_global_batch is for sync replicas, whose gradients are summed"
      f" in shares; this strategy is {strategy.name!r}."
    )


def _cores() -> int | None:
  """The number of cores this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def has_counted(resolved: effects.Resolved) -> bool | None:
  """Whether a submission was committed; None if unknown."""
  return None if resolved.reason == "lost" else not resolved.reason


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
