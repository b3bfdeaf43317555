"""A replica's part in a run: what its training loop and its event loop share.

    training loop   Replica.step -> Loop.add -> Participant.submit   a sum of gradients
                                             <- Participant.wait     its outcome
    event loop      Driver, which notifies the TrainingInbox

`SynchronousLoop` is the `Loop` of most strategies; one whose replicas don't wait for
each step has its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist import ledger, quorum
from optax_dist._internal import checks
from optax_dist.coordinator import errors, journal, options, strategies
from optax_dist.coordinator.aggregation import layout, means, nodes, reducer
from optax_dist.coordinator.data import arguments, micro_batches
from optax_dist.coordinator.data import probe as probes
from optax_dist.coordinator.fingerprints import fingerprint
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import config, entries, messages
from optax_dist.coordinator.protocol.entries import Lineage
from optax_dist.coordinator.runtime import (
  agreement,
  driver,
  endpoint,
  states,
  timings,
  trees,
  update,
  watchdog,
)
from optax_dist.coordinator.runtime.processes import Parts, Processes
from optax_dist.coordinator.strategies import hyperparams
from optax_dist.coordinator.training.submission import Submission

_log = logging.getLogger("optax_dist.coordinator")

# Seconds in which replicas usually join.
_JOINS_WITHIN = 6.0
# Bytes of what the gradients of a step say of their data, as JSON.
_MOST_TEXT = 512 << 10


class Loop(Protocol):
  """How a replica takes part in steps, behind `Replica.step`.

  Attributes:
    weighs_tokens: whether a contribution's weight is its number of tokens.
    local: the local state of the strategy.
  """

  weighs_tokens: bool
  local: Any

  def begin(self, warm: bool = False) -> None:
    """The replica was admitted, and its training loop starts to compute.

    Args:
      warm: whether it has compiled what it computes.
    """
    ...

  def add(self, grads: Any, batch: str, tokens: int) -> Outcome:
    """Contributes a gradient.

    Args:
      grads: a tree like the parameters.
      batch: its data for the journal, as JSON text.
      tokens: that it was computed on.
    """
    ...

  def abandon(self) -> Outcome:
    """Gives up the gradient that is computed, and catches up."""
    ...

  def ended(self, gradients: int) -> Outcome | None:
    """The outcome to return if nothing can be submitted any more.

    Args:
      gradients: how many were computed, and are not in the submission.
    """
    ...


class Participant:
  """A replica's part in a run.

  Attributes:
    replica: its id.
    process: how the coordinator calls this process.
    strategy: what replicas share, keep and send.
    settings: the options of the run.
    processes: the processes of the replica, of which this is one.
    config: the configuration of the protocol core.
    template: what gradients must be like.
    data: the samples that are leased; None if none are.
    slots: the micro-batches of deterministic data; None without.
    sums: adds up their gradients; None without.
    most_text: bytes of a submission's batches, as JSON.
    update: what is sent of a gradient, and what a mean changes.
    layout: that of gradients, and of means.
    driver: the event loop.
    inbox: what the event loop has notified.
    submission: what is summed and submitted.
    stopwatch: measures the training loop.
    watchdog: finds a training loop that is stuck.
    tell: called with an event for the launcher, and its fields.
    closed: whether the replica was closed.
    to_save: the state to save; None: that of the parameters.
  """

  def __init__(
    self,
    place: endpoint.Endpoint,
    strategy: strategies.Strategy,
    params: Any,
    *,
    replica: quorum.Replica,
    settings: options.Options,
    opt_state: Any = None,
    inner_state: Any = None,
    global_step: int = 0,
    on_stuck: Callable[[str], None] | None = None,
    processes: Processes | None = None,
    data: ledger.Batches | None = None,
    progress: ledger.Progress | None = None,
    lineage: Lineage | None = None,
    probe: probes.Probe | None = None,
    follows: tuple[tuple[str, int], ...] = (),
  ):
    """Prepares it; the event loop is started by `join`.

    Args:
      place: the replica's transport, and where its coordinator is.
      strategy: what replicas share, keep and send.
      params: the initial parameters.
      replica: its id.
      settings: the options of the run.
      opt_state: the optimizer state of a checkpoint.
      inner_state: that of the replica's own optimizer, or "fresh"; see `join`.
      global_step: the step of a checkpoint.
      on_stuck: called when the watchdog evicts the replica.
      processes: the processes of the replica; None: this one.
      data: the samples that are leased.
      progress: which of them are in committed steps.
      lineage: of a checkpoint: the runs that it comes from.
      probe: computes a gradient, to compare bits with other replicas.
      follows: earlier memberships of this program, which are closed.
    """
    self.replica, self.strategy, self.settings = replica, strategy, settings
    self.processes = processes or Processes()
    global_step = checks.count("global_step", global_step, least=0)
    params = trees.as_params(params)
    shared = strategy.shared(params)
    if opt_state is not None:
      trees.check_like("opt_state", opt_state, shared.opt_state)
      shared = shared._replace(opt_state=opt_state)
    self.template = trees.Template(params)
    inner = strategy.inner_state(strategy.local(shared))
    begins_fresh = isinstance(inner_state, str)
    if inner_state is not None and not begins_fresh:
      inner = _restored(inner_state, inner, strategy)
      shared = shared._replace(hyperparams=hyperparams.find(inner))
    alike = agreement.agreement(strategy, shared, params, settings, data, inner)
    parts = self.processes.parts(strategy, params, shared, inner)
    self.update, self.layout, shared = _compiled(
      strategy, params, parts, settings.wire
    )
    # Shards are exchanged however small they are: no process has the whole
    # gradient.
    nbytes = self.layout.nbytes
    whole = parts.gradient is None
    self._inline = whole and nbytes <= settings.inline_bytes
    # Where gradients are encoded that are sent inline.
    self._scratch = np.empty(nbytes, np.uint8) if self._inline else None
    numbers = strategy.quorum
    # Those of a step are in one message.
    gradients = max(numbers.replicas_to_aggregate, numbers.total_num_replicas)
    self.most_text = _MOST_TEXT // gradients
    self.data = data
    samples = arguments.samples_per_gradient(data, strategy)
    add: Callable[[Any, Any], Any]
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self.slots: micro_batches.Slots | None = None
    self.sums: micro_batches.Sums | None = None
    window = 0
    if data is not None and data.deterministic:
      self.slots = micro_batches.Slots(data)
      summing = nodes.Summing(
        self.layout,
        data.slots,
        lambda: self.driver.allocate(),
      )
      self.sums = micro_batches.Sums(self.slots, summing, self.processes)
      add, window = self.sums.add, data.global_batch
      start = strategy.params(shared, strategy.local(shared))
      text = "" if probe is None else self._probed(probe, start, self.slots)
      alike += (("gradient of a probe", text),)
    averages = reducer.Reducer(self.layout, data if window else None)
    transport = place.transport
    self.process = transport.name
    address, digest = self.processes.meet(
      (transport.name, transport.address), fingerprint(shared)
    )
    progress = ledger.Progress() if progress is None else progress
    about = {
      "strategy": strategy.name,
      **numbers._asdict(),
      "cores": probes.cores(),
      "weight": numbers.weight and "inverse_staleness",
      "wire": settings.wire,
      "inline": self._inline,
      "gradient_bytes": nbytes,
      "data": None if data is None else vars(data),
      "config": dict(settings.config),
    }
    job = entries.Job(
      alike + parts.agreement,
      entries.Rules(
        **numbers._asdict(),
        inline_bytes=nbytes if self._inline else None,
        alone=strategy.alone,
        timeout=float(settings.timeout),
        transfer_timeout=settings.transfer_timeout,
        silence_timeout=settings.silence_timeout,
        stall_warning=float(settings.stall_warning),
        fingerprint_every=settings.fingerprint_every,
        max_skipped=settings.max_skipped,
      ),
      leaves=tuple(
        [(tuple(x.shape), str(x.dtype)) for x in self.update.blocks]
        if self._inline
        else []
      ),
      wire=settings.wire,
      data=data,
      fragments=strategy.fragments,
      about=journal.to_json("the run", about),
      journal="" if settings.journal is None else os.fspath(settings.journal),
      run=settings.run,
    )
    self.config = config.Config(job)
    me = config.Me(
      transport.name,
      replica,
      address,
      entries.Start(
        global_step,
        f"{digest}-{progress}" if progress.next else digest,
        progress,
        lineage or (),
      ),
      endpoint.COORDINATOR,
      place.coordinator,
      inner is not None and not begins_fresh,
      follows,
    )
    self.driver = driver.Driver(
      self.processes.core(self.config, me),
      place,
      replica=replica,
      gradients=self.layout,
      reducer=averages,
      initial=shared,
      step=global_step,
      apply=self.update.apply,
      deadlines=self.config.deadlines,
      silence=settings.silence,
      processes=self.processes,
      shards=parts.state,
      inner=parts.inner,
    )
    if begins_fresh:
      self.driver.arrays.states.keep(parts.inner)
    self.inbox = self.driver.inbox
    self.tell: Callable[..., None] = lambda event, **fields: None
    self.inbox.on_finished = lambda: self.tell("finished")
    self.submission = Submission(
      self.inbox.published,
      add,
      max_staleness=numbers.max_staleness if strategy.loop is None else None,
      samples=samples,
      window=window,
    )
    self.stopwatch = timings.Stopwatch()
    # Without a launcher to restart it, a process is ended only on request.
    ends = bool(settings.step_timeout or on_stuck)
    self._on_stuck = on_stuck
    self.watchdog = watchdog.Watchdog(
      settings.steps,
      f"replica {replica}",
      self.driver.stalled,
      self._evict if ends else None,
    )
    self.closed = False
    self.to_save: states.State | None = None
    # The last step announced to be saved.
    self._saved = -1

  def _probed(
    self, probe: probes.Probe, params: Any, slots: micro_batches.Slots
  ) -> str:
    """What a probe found."""
    first = ((0, slots.data.unit(slots.data.slots)),)

    def update(start: Any, grads: Any) -> Any:
      leaves = jax.tree.leaves(self.template.fit(grads))
      arrays = [np.asarray(leaf) for leaf in leaves]
      return self.update.apply(self.strategy.shared(start), arrays)

    return probes.result(probe, params, slots(first), update)

  # Its beginning and its end.

  def join(self, check: Callable[[], None]) -> None:
    """Starts the event loop, and waits until the replica is admitted.

    Args:
      check: called once the event loop has started; may raise.

    Raises:
      CoordinatorError: see `Replica.start`.
    """
    seen = self.inbox
    admitted = lambda: seen.incarnation >= 0
    seconds = min(self.settings.stall_warning, _JOINS_WITHIN)
    self.driver.start()
    check()
    if not (seen.wait(admitted, seconds) or seen.is_over):
      # Only the coordinator reports stalls, and it may never be reached.
      _log.warning(
        "Replica %r has not joined the run after %.1f s. %s",
        *(self.replica, seconds, self.driver.missing()),
      )
    self.wait(admitted, "for admission to the run")
    self.resume()
    self.driver.arrays.states.keep(self.driver.arrays.states.inner)

  def close(self) -> None:
    """Stops the threads and waits for them, but for those of a parent process."""
    self.closed = True
    if self.driver.loop.is_forked:
      return
    self.watchdog.close()
    if self.sums is not None:
      self.sums.close()
    self.driver.loop.close("closed")
    self.inbox.close()

  def leave(self) -> None:
    """Leaves the run gracefully; the others go on.

    Raises:
      CoordinatorError: no acknowledgement came within `timeout` seconds.
    """
    self.raise_failure()
    self.driver.enqueue(messages.Leave(lost=False))
    left = lambda: self.inbox.left
    self.wait(left, "for the confirmation that it may leave")
    self.tell("left")

  def abort(self, reason: str, failure: BaseException) -> None:
    """Ends its part in the run at once, and closes it.

    Args:
      reason: for the others.
      failure: what the training loop gets.
    """
    self.inbox.fail(failure)
    self.driver.enqueue(messages.Leave(True, reason))
    self.close()

  def _evict(self, reason: str, stacks: str) -> None:
    """Called by the watchdog: the training loop is stuck."""
    if self.is_over or self.inbox.failure is not None:
      return
    self.driver.evict(reason, stacks)
    if self._on_stuck is not None:
      self._on_stuck(reason)

  @property
  def is_over(self) -> bool:
    """Whether the run is over, or this replica has left it."""
    return self.inbox.left or self.inbox.finished is not None

  # The state.

  @property
  def shared(self) -> strategies.SharedState:
    """The state all replicas share, as of the last `step`."""
    shared: strategies.SharedState = self.submission.base.get()
    return shared

  def fresh_local(self) -> Any:
    """The local state of a replica that starts from the shared state.

    Its own optimizer starts from what it had at its last exchange; before the first
    one from a checkpoint, or from what came with a snapshot.
    """
    return self.strategy.local(self.shared, self.driver.arrays.states.inner)

  def resume(self) -> None:
    """Continues from the current shared state."""
    # In this order: it may be readmitted in between.
    incarnation = self.inbox.incarnation
    published = self.inbox.published
    published.get()  # Waits until it is computed.
    self.submission.resume(incarnation, published)
    self.forget()

  def forget(self) -> None:
    """Forgets what the training loop has no more use for."""
    self.inbox.forget(self.submission.sequence, self.held_steps())

  def held_steps(self) -> tuple[int, ...]:
    """The steps of the parameters and of the state to save."""
    current = self.submission.base.step
    return (current,) if self.to_save is None else (current, self.to_save.step)

  def outcome(self, reason: str = "", **fields: Any) -> Outcome:
    """The outcome of what was dropped for this reason, or was not."""
    return Outcome(not reason, reason, self.submission.base.step, **fields)

  def announce(self, outcome: Outcome) -> Outcome:
    """Announces once that the common step to save has been reached."""
    # Held before it is looked at: a newer one may replace it meanwhile.
    kept = self.to_save = self.inbox.to_save
    if kept is None or not self._saved < kept.step <= self.submission.base.step:
      self.to_save = None
      return outcome
    self._saved = kept.step
    return outcome._replace(save=kept.step)

  def check_hyperparams(self, values: Mapping[str, float]) -> None:
    """Checks what `Replica.set_hyperparams` is given.

    Raises:
      ValueError: see there.
    """
    own = hyperparams.find(self.shared.opt_state)
    known = dict(self.shared.hyperparams)
    for name, arrays in own.items():
      known[name] = (*known.get(name, ()), *arrays)
    for name, value in values.items():
      if name not in known:
        raise ValueError(
          f"set_hyperparams({name}=...) needs a number that the optimizer has in its"
          f" state; it has {', '.join(sorted(known)) or 'none'}. Give it as one, and"
          f" not as a schedule: optax.inject_hyperparams(optax.sgd)({name}=0.1)."
        )
      for array in known[name]:
        if np.shape(array):
          raise ValueError(
            f"set_hyperparams({name}=...) is for single numbers, and {name} is"
            f" {array.dtype}{list(array.shape)}."
          )
        with np.errstate(over="ignore", invalid="ignore"):
          number = float(np.asarray(value).astype(array.dtype))
        whole = not jnp.issubdtype(array.dtype, jnp.floating)
        if not np.isfinite(number) or (whole and number != value):
          raise ValueError(
            f"{name} must be a finite {array.dtype}, got {value!r}."
          )

  # Submissions.

  def compute(self, first: bool) -> None:
    """Times what is computed from now on.

    Args:
      first: whether it is the first part of a submission.
    """
    self.stopwatch.begin(first)
    self._watch()

  def _watch(self) -> None:
    """Starts the watchdog for the next step, if there will be one."""
    if not self.is_over:
      self.watchdog.steps.begin()

  def submit(self, inner_state: Any, work: bytes = b"") -> None:
    """Submits the sum, or reports stale gradients.

    Args:
      inner_state: of the replica's own optimizer; None for none.
      work: see `messages.SubmitGradient`.
    """
    submission = self.submission
    finite, payload = True, b""
    parts: Sequence[memoryview] = ()
    # Stale gradients are reported without their numbers.
    if self.sums is not None and submission.total is not None:
      total = submission.total.result()
      parts, work = [array.data for array in total.arrays], total.work
    elif submission.total is not None:
      out = self._scratch
      if out is None:
        out = np.frombuffer(self.driver.allocate(), np.uint8)
      written = means.write(
        self.update.split(submission.total),
        self.layout,
        out,
        # If all are on this host, they read it in memory that all of them have.
        in_place=not self._inline and self.driver.has_remote_peers,
      )
      finite = written is not None
      if written is not None:
        parts = written
    if finite and submission.total is not None:
      self.driver.arrays.states.keep(inner_state)
    if self._inline:
      payload, parts = b"".join(parts), ()
    arrays = self.driver.arrays
    exchanged, seconds = arrays.exchanged
    measured = self.stopwatch.submitted(
      seconds if exchanged == submission.sequence - 1 else 0.0,
      arrays.states.seconds,
      arrays.moved(),
    )
    submitted = submission.submit(finite, payload, measured, work)
    self.driver.submit(submitted, parts)
    self.watchdog.steps.end()

  # Waits.

  def wait(self, ready: Callable[[], bool], what: str) -> None:
    """Waits, slightly longer than the core's own deadline.

    Args:
      ready: what to wait for, or for the run's end.
      what: the same for the error, as in "for the end of the run".

    Raises:
      CoordinatorError: it did not come, or the run can't go on.
    """
    patience = self.config.deadlines.replica + 1.0
    if self.closed and not ready():
      self.raise_failure()
    self.watchdog.steps.end()
    if self.inbox.wait(ready, patience):
      self._watch()
      return
    self.raise_failure()
    if self.inbox.finished is not None:
      return
    raise errors.CoordinatorError(
      f"Replica {self.replica!r} has waited {patience:.1f} s {what}."
      f" {self.driver.missing()}"
    )

  def raise_failure(self) -> None:
    """Raises the error that ended this replica's part in the run, if any."""
    if self.inbox.failure is not None:
      raise self.inbox.failure
    if self.closed and not self.is_over:
      raise errors.CoordinatorError(
        f"Replica {self.replica!r} is closed: it takes no step after its `with`"
        " block. Join again for another one."
      )


def compile_update(
  strategy: strategies.Strategy, params: Any, settings: options.Options
) -> None:
  """Has the update of a replica of one process compiled before it is made."""
  params = trees.as_params(params)
  shared = strategy.shared(params)
  inner = strategy.inner_state(strategy.local(shared))
  parts = Processes().parts(strategy, params, shared, inner)
  _compiled(strategy, params, parts, settings.wire)


def _compiled(
  strategy: strategies.Strategy, params: Any, parts: Parts, wire: str
) -> tuple[update.Update, layout.Layout, Any]:
  """The update, the layout of gradients, and the first state, placed as by one.

  The update is compiled here, and what a replica does by itself until then, so that
  no round has to wait for it.
  """
  made = update.Update(strategy, params, parts)
  sent = layout.layout(made.blocks, wire)
  nothing = means.read(sent, np.zeros(sent.nbytes, np.uint8))
  after = made.apply(parts.shared, nothing)
  # Otherwise programs would be compiled anew after an update.
  shared = jax.tree.map(trees.placed_like, parts.shared, after)
  if (
    isinstance(strategy, strategies.WaitingStrategy) and parts.inner is not None
  ):
    local = strategy.local(shared, parts.inner)
    grads = jax.tree.map(jnp.zeros_like, params)
    strategy.contribute(shared, local, grads)
    strategy.so_far(shared, local)
    strategy.settle(shared, shared, local, mine=True)
  return made, sent, shared


def _restored(given: Any, fresh: Any, strategy: strategies.Strategy) -> Any:
  """The state of a replica's own optimizer, from a tree like it or its leaves.

  Args:
    given: the argument `inner_state` of `join`.
    fresh: what the strategy begins with.
    strategy: named in errors.

  Raises:
    ValueError: it is not like the fresh one.
  """
  if fresh is None:
    raise ValueError(
      "inner_state= is the state of a replica's own optimizer, with a strategy that"
      f" trains locally; {strategy.name!r} has none. Leave it out."
    )
  leaves, tree = jax.tree.flatten(fresh)
  words = list(map(trees.words_of, jax.tree.leaves(given)))
  trees.check_like("inner_state", words, list(map(trees.words_of, leaves)))
  pairs = zip(words, leaves, strict=True)
  restored = [trees.restored_like(a, leaf) for a, leaf in pairs]
  return jax.tree.unflatten(tree, restored)
