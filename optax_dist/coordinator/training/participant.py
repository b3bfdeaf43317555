"""A replica's part in a run, shared by its training loop and its event loop.

    training loop   Replica.step -> Loop.add -> Participant.submit   a sum of gradients
                                             <- Participant.wait     its outcome
    event loop      Driver, which notifies the TrainingInbox

`SynchronousLoop` is the `Loop` of most strategies; a strategy whose replicas don't wait
for each step has a loop of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from optax_dist import ledger, quorum
from optax_dist.coordinator import errors, options, strategies
from optax_dist.coordinator._internal.fingerprints import fingerprint
from optax_dist.coordinator.aggregation import reducer
from optax_dist.coordinator.data import probe as probes
from optax_dist.coordinator.outcome import Outcome
from optax_dist.coordinator.protocol import config, entries, messages
from optax_dist.coordinator.protocol.entries import Lineage
from optax_dist.coordinator.runtime import (
  agreement,
  driver,
  timings,
  trees,
  watchdog,
)
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.runtime.processes import Processes
from optax_dist.coordinator.runtime.states import State
from optax_dist.coordinator.training import job as jobs
from optax_dist.coordinator.training import model as models
from optax_dist.coordinator.training import preemption
from optax_dist.coordinator.training.encoder import Encoder
from optax_dist.coordinator.training.samples import Samples
from optax_dist.coordinator.training.submission import Submission

_log = logging.getLogger("optax_dist.coordinator")

# Seconds within which a replica usually joins; after that a warning is logged.
_JOINS_WITHIN = 6.0


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
      warm: whether the training loop's programs are compiled.
    """
    ...

  def add(self, grads: Any, batch: str, tokens: int) -> Outcome:
    """Contributes a gradient.

    Args:
      grads: a tree like the parameters.
      batch: its data for the journal, as JSON text.
      tokens: the number of tokens that it was computed on.
    """
    ...

  def abandon(self) -> Outcome:
    """Abandons the gradient that is being computed, and catches up."""
    ...

  def ended(self, gradients: int) -> Outcome | None:
    """The outcome to return if nothing can be submitted any more.

    Args:
      gradients: how many gradients were computed that are not in the submission.
    """
    ...


class Participant:
  """A replica's part in a run.

  Attributes:
    replica: its id.
    strategy: what replicas share, keep and send.
    settings: the options of the run.
    samples: the samples that are leased to it, if any are.
    encoder: encodes gradients.
    driver: the event loop.
    inbox: the notifications of the event loop.
    submission: the sum of gradients, and its outcome.
    saving: the state of the common step to save; None for the current state.
    stopwatch: measures the training loop.
    watchdog: finds a training loop that is stuck.
    tell: called with an event for the launcher, and its fields.
    closed: whether the replica was closed.
    gives_up: whether the replica has to leave, and this share of its grace period is
      over.
  """

  def __init__(
    self,
    endpoint: endpoints.Endpoint,
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
    """Prepares the replica; its event loop is started by `join`.

    Args:
      endpoint: the replica's transport, and where its coordinator is.
      strategy: what replicas share, keep and send.
      params: the initial parameters.
      replica: its id.
      settings: the options of the run.
      opt_state: the optimizer state of a checkpoint.
      inner_state: the state of the replica's own optimizer, or "fresh"; see `join`.
      global_step: the step of a checkpoint.
      on_stuck: called when the watchdog evicts the replica.
      processes: the processes of the replica; None: this one.
      data: the samples that are leased.
      progress: which of these samples are in committed steps.
      lineage: the runs that led to a checkpoint.
      probe: computes a gradient, to compare bits with other replicas.
      follows: earlier memberships of this program, which are closed.
    """
    self.replica, self.strategy, self.settings = replica, strategy, settings
    processes = processes or Processes()
    model = models.prepare(
      strategy,
      params,
      settings.wire,
      processes=processes,
      opt_state=opt_state,
      inner_state=inner_state,
    )
    template = trees.Template(model.params)
    self.samples = Samples(
      data, model, processes, lambda: self.driver.allocate()
    )
    alike = agreement.agreement(
      strategy, model.start, model.params, settings, data, model.inner
    ) + self.samples.probed(probe, model, template)
    made = config.Config(jobs.job(model, settings, data, alike))
    start = (global_step, progress or ledger.Progress(), lineage or ())
    me = self._me(processes, endpoint, model, start, follows)
    self.driver = driver.Driver(
      processes.core(made, me),
      endpoint,
      replica=replica,
      reducer=reducer.Reducer(
        model.layout, data if self.samples.window else None
      ),
      initial=model.shared,
      step=global_step,
      apply=model.update.apply,
      deadlines=made.deadlines,
      silence=settings.silence,
      processes=processes,
      shards=model.parts.state,
      inner=model.parts.inner,
    )
    if model.is_fresh:
      self.driver.arrays.states.keep(model.parts.inner)
    self.encoder = Encoder(
      model, template, self.samples, jobs.is_inline(model, settings)
    )
    self.inbox = self.driver.inbox
    self.tell: Callable[..., None] = lambda event, **fields: None
    self.inbox.keeps_before = strategy.reads_before
    self.inbox.on_finished = lambda: self.tell("finished")
    self.submission = self._first_submission()
    self.stopwatch = timings.Stopwatch()
    self.saving: State | None = None
    # The last step announced to be saved.
    self._announced = -1
    # Without a launcher to start it again, a process is ended only on request.
    ends = bool(settings.step_timeout or on_stuck)
    self.watchdog = watchdog.Watchdog(
      settings.steps,
      self.stopwatch,
      f"replica {replica}",
      self.driver.stalled,
      functools.partial(self._evict, on_stuck) if ends else None,
    )
    self.closed = False
    self.gives_up: Callable[[float], bool] = lambda share: False

  def _me(
    self,
    processes: Processes,
    endpoint: endpoints.Endpoint,
    model: models.Model,
    start: tuple[int, ledger.Progress, Lineage],
    follows: tuple[tuple[str, int], ...],
  ) -> config.Me:
    """Which replica this is, once its processes have met."""
    own = endpoint.transport.name, endpoint.transport.address
    address, digest = processes.meet(own, fingerprint(model.shared))
    step, progress, lineage = start
    if progress.next:
      digest = f"{digest}-{progress}"
    return config.Me(
      endpoint.transport.name,
      self.replica,
      address,
      entries.Start(step, digest, progress, lineage),
      endpoints.COORDINATOR,
      endpoint.coordinator,
      model.inner is not None and not model.is_fresh,
      follows,
    )

  def _first_submission(self) -> Submission:
    max_staleness = None
    if self.strategy.loop is None:
      max_staleness = self.strategy.quorum.max_staleness
    return Submission(
      self.inbox,
      self.samples.add,
      max_staleness=max_staleness,
      samples=self.samples.each,
      window=self.samples.window,
    )

  # Joining and leaving.

  def join(self, check: Callable[[], None]) -> None:
    """Starts the event loop, and waits until the replica is admitted.

    Args:
      check: called once the event loop has started; may raise.

    Raises:
      CoordinatorError: see `Replica.start`.
    """
    seen = self.inbox
    admitted = lambda: seen.joined.incarnation >= 0
    seconds = min(self.settings.stall_warning, _JOINS_WITHIN)
    self.driver.start()
    check()
    if not (seen.wait(admitted, seconds) or seen.is_over):
      # Stalls are reported by the coordinator, which may be out of reach.
      _log.warning(
        "Replica %r has not joined the run after %.1f s, and waits for %.0f s more."
        " %s",
        *(self.replica, seconds, self.settings.longest_wait),
        self.driver.missing(),
      )
    self.wait(admitted, "for admission to the run")
    self.resume()
    self.driver.arrays.states.keep(self.driver.arrays.states.inner)

  def close(self) -> None:
    """Stops the threads and waits for them; in a forked child there are none."""
    self.closed = True
    if self.driver.loop.is_forked:
      return
    self.watchdog.close()
    self.samples.close()
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
    what = "for the confirmation that it may leave"
    try:
      self.wait(left, what, preemption.LEAVES_ALONE)
      self.tell("left")
    except preemption.Late:
      _log.warning(
        "Replica %r leaves without a confirmation, for it is about to be killed. %s",
        *(self.replica, self.driver.missing()),
      )
      self.inbox.left = True

  def abort(self, reason: str, failure: BaseException) -> None:
    """Leaves the run at once because of an error, and closes the replica.

    Args:
      reason: for the other replicas.
      failure: the error that the training loop gets.
    """
    self.lose(reason)
    self.inbox.fail(failure)
    self.close()

  def lose(self, reason: str) -> None:
    """Reports this replica as lost, so that the others need not wait for a timeout.

    Args:
      reason: why its program can't go on.
    """
    self.driver.enqueue(
      messages.Leave(True, reason, final=not self.driver.processes.may_restart)
    )
    if not self.is_over:
      self.tell("failed", reason=reason, own=True)

  def _evict(
    self, on_stuck: Callable[[str], None] | None, reason: str, stacks: str
  ) -> None:
    """Evicts the replica, when the watchdog finds that its training loop is stuck."""
    if self.inbox.left or self.inbox.failure is not None:
      return
    if self.inbox.finished is None:
      self.driver.evict(reason, stacks)
    # Also after the run, since the launcher waits for the end of this process.
    if on_stuck is not None:
      on_stuck(reason)

  @property
  def is_over(self) -> bool:
    """Whether the run is over, or this replica has left it."""
    return self.inbox.left or self.inbox.finished is not None

  # The state.

  @property
  def shared(self) -> strategies.SharedState:
    """The state all replicas share, as of the last `step`."""
    shared: strategies.SharedState = self.submission.base.value
    return shared

  def fresh_local(self) -> Any:
    """The local state of a replica that starts from the shared state.

    Its own optimizer starts from the state at its last exchange; before the first
    exchange from the state of a checkpoint or of a snapshot.
    """
    return self.strategy.local(self.shared, self.driver.arrays.states.inner)

  def resume(self) -> None:
    """Continues from the current shared state."""
    # The incarnation is read first: if the replica is admitted again in between, its
    # next gradient is found to be of an old membership.
    incarnation = self.inbox.joined.incarnation
    published = self.inbox.published
    self.computed(published)
    self.submission.resume(incarnation, published)
    self.forget()

  def computed(self, state: State) -> Any:
    """The arrays of a state, which may still be being computed.

    Raises:
      CoordinatorError: they did not come, or the run can't go on.
    """
    self.watch()  # An update may hang, as a step may.

    def check(waited: float) -> None:
      self.raise_failure()
      if waited > self.settings.longest_wait:
        raise errors.CoordinatorError(
          f"Replica {self.replica!r} has waited {waited:.1f} s for its optimizer's"
          f" update to step {state.step}."
        )

    return state.get(check)

  def forget(self) -> None:
    """Forgets answers and progress that the training loop no longer needs."""
    self.inbox.forget_answers(self.submission.sequence)
    if self.inbox.progress:
      self.inbox.forget_progress(self.held_steps)

  def outcome(self, reason: str = "", **fields: Any) -> Outcome:
    """The outcome of a gradient that was dropped for a reason, or applied ("")."""
    return Outcome(not reason, reason, self.submission.base.step, **fields)

  def announce(self, outcome: Outcome) -> Outcome:
    """Announces once that the common step to save has been reached.

    The state of that step is kept, since a slow replica may be past it already.
    """
    step, to_save = self.submission.base.step, self.inbox.to_save
    self.saving = None
    if to_save is None or not self._announced < to_save.step <= step:
      return outcome
    # Held here until the program reads it: the event loop may replace `inbox.to_save`
    # by a newer state.
    self.saving, self._announced = to_save, to_save.step
    return outcome._replace(save=to_save.step)

  @property
  def held_steps(self) -> list[int]:
    """The steps of the parameters and of the state to save."""
    held = (self.submission.base, self.saving)
    return [state.step for state in held if state is not None]

  @property
  def most_text(self) -> int:
    """See `config.most_text`."""
    numbers = self.strategy.quorum
    return config.most_text(
      numbers.replicas_to_aggregate, numbers.total_num_replicas
    )

  # Submissions.

  def compute(self, first: bool) -> None:
    """Times the computation that begins now.

    Args:
      first: whether it is the first one of a submission.
    """
    self.stopwatch.begin(first)
    self.watch()

  def watch(self) -> None:
    """Has the watchdog watch a step from now on, unless the run is over."""
    self.stopwatch.step = None if self.is_over else object()

  def submit(self, inner_state: Any, work: bytes = b"") -> None:
    """Submits the sum, or reports stale gradients.

    Args:
      inner_state: the state of the replica's own optimizer; None for none.
      work: see `messages.SubmitGradient`.
    """
    submission = self.submission
    try:
      sent = self.encoder.encode(submission.total, work, self.driver)
    except Exception:
      submission.drop(quorum.Reason.ABANDONED.value)
      raise
    # Stale gradients are reported without their numbers.
    whole = sent.finite and submission.total is not None
    if whole and self.encoder.is_sound(inner_state):
      self.driver.arrays.states.keep(inner_state)
    arrays = self.driver.arrays
    exchanged, seconds = arrays.exchanged
    measured = self.stopwatch.submitted(
      seconds if exchanged == submission.sequence - 1 else 0.0,
      arrays.states.seconds,
      arrays.moved(),
    )
    submitted = submission.submit(
      sent.finite, sent.payload, measured, sent.work
    )
    self.driver.submit(submitted, sent.parts)

  # Waits.

  def wait(
    self,
    ready: Callable[[], bool],
    what: str,
    share: float = preemption.NO_STEP,
  ) -> None:
    """Waits until something is ready; the watchdog watches no step from now on.

    Args:
      ready: whether to stop waiting; the run's end also stops the wait.
      what: the same for the error, as in "for the end of the run".
      share: the share of the grace period after which a replica that has to leave
        waits no longer.

    Raises:
      CoordinatorError: the wait took too long, or the run can't go on.
      Late: the replica has to leave before it is ready.
    """
    if self.closed and not ready():
      self.raise_failure()
    self.stopwatch.step = None
    longest = self.settings.longest_wait
    # Another thread may close the replica.
    gives_up = lambda: self.closed or self.gives_up(share)
    if self.inbox.wait(ready, longest, gives_up):
      return
    self.raise_failure()
    if self.is_over:
      return
    if self.inbox.agree(self.gives_up(share)):
      raise preemption.Late
    raise errors.CoordinatorError(
      f"Replica {self.replica!r} has waited {longest:.1f} s {what}."
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
