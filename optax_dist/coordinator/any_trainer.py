"""The coordinator as an optax transformation, for trainers with their own loop."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from optax_dist._internal import checks
from optax_dist.coordinator import errors, joining
from optax_dist.coordinator.launch import channel
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import processes, threads
from optax_dist.coordinator.training import preemption

T = TypeVar("T")

# Options of `join` that a trainer's own loop can't use, each with the reason.
_REFUSED = {
  "strategy": (
    "replicas that train locally have parameters of their own, which no step of"
    " the run names"
  ),
  "data": "samples are leased by Replica.batches(), and a trainer has its own",
  "progress": "samples are leased by Replica.batches(), and a trainer has its own",
  "max_staleness": (
    "a trainer adds an update to its parameters, which reaches those of several"
    " steps later only within rounding"
  ),
  "staleness_weight": "only fresh gradients count",
  "opt_state": "it is in the state of the transformation",
  "global_step": "it is in the state of the transformation",
}


class BehindState(NamedTuple):
  """The state of `Behind.tx`, all that a trainer's checkpoint needs.

  Attributes:
    step: the committed step whose parameters the trainer has.
    calls: updates so far; it shows if one was discarded.
    dropped: gradients of this replica that are in no committed step.
    finished: whether the run is over.
    inner: the state of the inner optimizer, as of `step`.
  """

  step: jax.Array
  calls: jax.Array
  dropped: jax.Array
  finished: jax.Array
  inner: Any


class _Counts(NamedTuple):
  """The numbers of a `BehindState`, on the host."""

  step: int
  calls: int
  dropped: int
  finished: bool


def behind(
  optimizer: optax.GradientTransformation,
  *,
  total_steps: int,
  accumulate: int = 1,
  **options: Any,
) -> Behind:
  """Puts the coordinator behind an optax transformation.

  For trainers that have their own loop and take an optimizer: the process is a
  replica of a run, whose steps apply `optimizer` to the mean gradient of k of N
  replicas. It joins at the first update, with the trainer's parameters, state
  and step.

  Args:
    optimizer: what each step applies to the mean gradient, weight decay and
      schedules included. Schedules follow the run's steps.
    total_steps: steps of the run, after which it ends for all replicas.
    accumulate: gradients of this replica whose mean is one contribution, instead
      of `optax.MultiSteps` and a trainer's gradient accumulation.
    **options: of `join`; with `optax-dist launch`, none are needed.

  Raises:
    ValueError, TypeError: an option can't be used with a trainer's own loop.

  Example::

      k_of_n = coordinator.behind(optax.adamw(schedule), total_steps=400)
      optimizer = nnx.Optimizer(model, k_of_n.tx, wrt=nnx.Param)
      for batch in k_of_n.until_finished(batches):
        train_step(model, optimizer, batch)
  """
  for name, reason in _REFUSED.items():
    if options.get(name):
      raise ValueError(
        f"behind() can't use {name}={options[name]!r:.100}: {reason}. Leave it out,"
        " or write the loop yourself, with coordinator.join and Replica.step."
      )
  if processes.of_this_program().count > 1:
    raise ValueError(
      "behind() is for replicas of one process, in which a trainer's callback is."
      " Write the loop yourself, with coordinator.join and Replica.step."
    )
  return Behind(
    optimizer,
    checks.count("total_steps", total_steps),
    checks.count("accumulate", accumulate),
    options,
  )


class Behind:
  """A replica behind an optax transformation; created by `behind`.

  Attributes:
    tx: the transformation to give to the trainer, as the last one of a chain.
    replica: this process's replica; None before the first update.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    total_steps: int,
    accumulate: int,
    options: dict[str, Any],
  ):
    self.tx = optax.GradientTransformationExtraArgs(self._init, self._update)
    self.replica: Replica | None = None
    self._optimizer, self._options = _reachable(optimizer), options
    self._total_steps, self._accumulate = total_steps, accumulate
    # Under jit, JAX is called in this thread and not in the callback.
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "optax-dist-behind")
    self._lock = threading.RLock()
    self._preempted: preemption.Preemption | None = None
    self._failure: BaseException | None = None
    self._closed = self._settled = self._raises_later = False
    # The latest result, and the parameters before and after it.
    self._counts: _Counts | None = None
    self._before: list[Any] = []
    self._after: list[Any] = []
    self._inner: list[Any] = []
    # The sum of gradients, in float32, and how many there are.
    self._sum: list[Any] = []
    self._summed = 0

  # The training loop.

  @property
  def finished(self) -> bool:
    """Whether the run is over and the trainer has its last parameters."""
    return self._settled or self._closed

  def until_finished(self, batches: Iterable[T]) -> Iterator[T]:
    """Yields batches until the run is over, then closes the replica.

    The replica leaves the run if the batches or the trainer end earlier, and on
    SIGTERM, after its step. After the run's last step there is at least one more
    batch: its update verifies that the trainer has the last parameters.

    Yields:
      The batches.

    Raises:
      The error that ended this replica's part in the run; under jit, the trainer
        would see it as one of XLA's.
    """
    self._raises_later = True
    left = iter(batches)
    with self._leaving_on_sigterm() as preempted:
      while self._failure is None and not (self.finished or preempted.received):
        try:
          batch = next(left)
        except StopIteration:
          break
        yield batch
    if self._failure is not None:
      raise self._failure

  def close(self, error: BaseException | None = None) -> None:
    """Ends this replica's part; what comes twice has no effect.

    Args:
      error: tells the others at once that the replica is lost; without one it
        leaves gracefully.
    """
    atexit.unregister(self._at_exit)
    error = self._failure or error
    with self._lock:
      if self.replica is not None and not self._closed:
        self._closed = True
        self.replica.__exit__(
          None if error is None else type(error), error, None
        )
      self._closed = True
    self._worker.shutdown(wait=False)

  def _at_exit(self) -> None:
    # An error that ends the program keeps the loop's generator until there are no
    # threads any more, and leaving would wait for them.
    self.close(errors.CoordinatorError("The program ended inside of its loop."))

  @contextlib.contextmanager
  def _leaving_on_sigterm(self) -> Iterator[preemption.Preemption]:
    # `join` can't do this in the worker: Python has signals in the main thread.
    self._preempted = preempted = preemption.Preemption(
      "leave",
      Environment.read().grace,
      interrupts=channel.current() is not None,
    )
    preempted.install()
    if self.replica is not None:
      preempted.joined()
    try:
      yield preempted
    finally:
      preempted.remove()
      self.close()

  # The transformation.

  def _init(self, params: Any) -> BehindState:
    # Each has a buffer of its own: trainers donate the state.
    step, calls, dropped = (jnp.zeros((), jnp.int32) for _ in range(3))
    finished = jnp.zeros((), jnp.bool_)
    return BehindState(
      step, calls, dropped, finished, self._optimizer.init(params)
    )

  def _update(
    self, grads: Any, state: BehindState, params: Any = None, **extra: Any
  ) -> tuple[Any, BehindState]:
    del extra  # A step is computed from the mean gradient alone.
    if params is None:
      raise ValueError(
        "The coordinator's transformation needs the parameters: call"
        " update(grads, state, params)."
      )
    shape: Any = jax.tree.structure(params)
    leaves = jax.tree.leaves(grads), jax.tree.leaves(params)
    is_traced = any(
      isinstance(x, jax.core.Tracer)
      for x in jax.tree.leaves((grads, state, params))
    )
    run = self._traced if is_traced else self._eager
    updates, counts, inner = run(*leaves, state)
    inner = jax.tree.unflatten(jax.tree.structure(state.inner), inner)
    step, calls, dropped, finished = counts
    new = BehindState(step, calls, dropped, finished, inner)
    return shape.unflatten(updates), new

  def _eager(self, grads: Any, params: Any, state: BehindState) -> Any:
    with self._lock:
      if self.replica is None:
        # Copies: the trainer may donate its own.
        own, inner = jax.tree.map(jnp.copy, (params, state.inner))
        self._join(own, inner, int(state.step))
      counts = _read(state)
      after, counts, inner = self._advance(grads, params, counts)
    # Where the trainer has its own, which `join` may have had on the host.
    after = list(map(_like, after, params))
    inner = list(map(_like, inner, jax.tree.leaves(state.inner)))
    pairs = zip(params, after, strict=True)
    updates = [_move_on_device(p, q) for p, q in pairs]
    inner = list(map(jnp.copy, inner))  # The trainer may donate its own.
    numbers = [
      jnp.asarray(x, old.dtype) for x, old in zip(counts, state, strict=False)
    ]
    return updates, numbers, inner

  def _traced(self, grads: Any, params: Any, state: BehindState) -> Any:
    _check_devices()
    like = lambda tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tree
    )
    inner = jax.tree.leaves(state.inner)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    # Parameters and state go to the host as a whole for the first update only.
    has_joined = io_callback(
      lambda calls: np.array(self.replica is not None or self._ended),
      flag,
      state.calls,
    )
    ready = jax.lax.cond(
      has_joined,
      lambda: jnp.zeros((), jnp.bool_),
      lambda: io_callback(
        self._join_in_callback, flag, params, state.inner, state.step
      ),
    )
    after, numbers, inner = io_callback(
      self._advance_in_callback,
      (like(params), list(like(state[:4])), like(inner)),
      *(grads, params, list(state[:4]), ready),
    )
    return list(map(_move, params, after)), numbers, inner

  # The callbacks under jit, which call no JAX themselves.

  @property
  def _ended(self) -> bool:
    return self._closed or self._failure is not None

  def _join_in_callback(self, params: Any, inner: Any, step: Any) -> Any:
    params, inner = jax.tree.map(np.array, (params, inner))
    # Kept for the trainer's state if joining fails.
    self._inner = jax.tree.leaves(inner)
    join = lambda: self._join(_on_host(params), _on_host(inner), int(step))
    self._in_worker(join)
    return np.array(True)

  def _advance_in_callback(
    self, grads: Any, params: Any, numbers: Any, ready: Any
  ) -> Any:
    grads, params = jax.tree.map(np.asarray, (grads, params))
    counts = _read(numbers)
    run = lambda: self._advance(grads, params, counts)
    result = None if self._ended else self._in_worker(run)
    if result is None:
      # The trainer goes on with what it has until it asks for a batch.
      stays = counts._replace(calls=counts.calls + 1, finished=True)
      result = params, stays, self._inner
    after, counts, inner = result
    numbers = [np.int32(x) for x in counts[:3]] + [np.bool_(counts.finished)]
    return jax.tree.map(np.asarray, (after, numbers, inner))

  def _in_worker(self, work: Callable[[], T]) -> T | None:
    """Runs work that calls JAX; None if its error is raised later."""

    def locked() -> T:
      with self._lock:
        return work()

    try:
      run = threads.in_this_precision(locked)
      return self._worker.submit(run).result()
    except BaseException as error:
      self._failure = error
      if not self._raises_later:
        raise
      return None

  # The replica; both ways to call the update share this.

  def _join(self, params: Any, inner: Any, step: int) -> None:
    """Joins the run, unless it has."""
    if self.replica is not None:
      return
    fresh = self._optimizer.init(params)
    shape: Any = jax.tree.structure(fresh)
    self.replica = joining.join(
      self._optimizer,
      params,
      opt_state=shape.unflatten(jax.tree.leaves(inner)),
      global_step=step,
      **self._options,
    )
    self._shape: Any = jax.tree.structure(self.replica.params)
    atexit.register(self._at_exit)
    if self._preempted is not None:
      self._preempted.joined()

  def _advance(
    self, grads: Sequence[Any], params: Sequence[Any], counts: _Counts
  ) -> tuple[list[Any], _Counts, list[Any]]:
    """Sends a gradient, unless it was computed on other parameters.

    Returns:
      The parameters to move to, the numbers of the state, the optimizer's state.
    """
    replica = self.replica
    assert replica is not None
    over = self._closed or replica.finished
    if replica.global_step >= self._total_steps or (over and not self._closed):
      replica.finish()  # Also where others have: it gets the last parameters.
      over = True
    here, dropped = jax.tree.leaves(replica.params), counts.dropped
    is_current = counts.step == replica.global_step and _same(params, here)
    self._check_use(params, counts, is_current)
    if over:
      self._settled = is_current
    elif not is_current:
      dropped += 1 + self._summed
      self._summed = 0
      replica.abandon()
    elif self._add(grads):
      outcome = replica.step(self._shape.unflatten(self._mean(grads)))
      dropped += 0 if outcome.accepted else self._accumulate
      if replica.global_step >= self._total_steps:
        replica.finish()
    self._before = here if is_current else [np.array(x) for x in params]
    self._after = jax.tree.leaves(replica.params)
    self._inner = jax.tree.leaves(replica.opt_state)
    self._counts = _Counts(
      replica.global_step,
      counts.calls + 1,
      dropped,
      replica.finished or self._closed,
    )
    return self._after, self._counts, self._inner

  def _check_use(
    self, params: Sequence[Any], counts: _Counts, is_current: bool
  ) -> None:
    """Refuses trainers that don't apply the updates as they are."""
    last = self._counts
    if last is None:
      return
    if counts.calls == last.calls - 1:
      raise ValueError(
        "The last update of the coordinator's transformation was discarded, and"
        " its gradient may be in a step: optax.MultiSteps, apply_if_finite or the"
        " trainer's gradient accumulation is around it. Leave that out, and use"
        " behind(..., accumulate=n); gradients that are not finite are dropped by"
        " the coordinator."
      )
    if (
      not is_current
      and (counts.step, counts.calls) == (last.step, last.calls)
      and not _rounded(params, self._before, self._after)
    ):
      raise ValueError(
        "The parameters are not those that the last update of the coordinator's"
        " transformation leads to: something after it in the chain, or the"
        " trainer, changes updates or parameters. Make it the last one of the"
        " chain, and put what scales, decays or clips updates into the optimizer"
        " that behind() gets."
      )

  def _add(self, grads: Sequence[Any]) -> bool:
    """Adds a gradient to the sum; returns whether the sum is complete."""
    if self._accumulate == 1:
      return True
    wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in grads]
    if self._summed:
      wide = [a + b for a, b in zip(self._sum, wide, strict=True)]
    self._sum, self._summed = wide, self._summed + 1
    return self._summed == self._accumulate

  def _mean(self, grads: Sequence[Any]) -> list[Any]:
    if self._accumulate == 1:
      return list(grads)
    self._summed = 0
    pairs = zip(self._sum, grads, strict=True)
    return [(a / self._accumulate).astype(g.dtype) for a, g in pairs]


def _move(p: Any, q: Any) -> Any:
  """The update that leads from p to q; equal numbers, -0.0 too, stay."""
  return jnp.where(p == q, jnp.asarray(-0.0, p.dtype), q - p)


_move_on_device = jax.jit(_move)


def _reachable(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Makes each step's parameters reachable from the ones before, bit for bit.

  XLA may compute `p + learning_rate * x` without rounding the product. Then no
  number leads from p to the result by an addition, which is all that trainers
  do. After this, one does, and it is `q - p`.
  """
  tx = optax.with_extra_args_support(optimizer)

  def rounded_move(p: Any, q: Any) -> Any:
    # XLA may otherwise keep more digits of narrow numbers.
    kind = jnp.finfo(p.dtype)
    return jax.lax.reduce_precision(_move(p, q), kind.nexp, kind.nmant)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    after = optax.apply_updates(params, updates)
    return jax.tree.map(rounded_move, params, after), state

  return optax.GradientTransformation(tx.init, update)


def _same(params: Sequence[Any], here: Sequence[jax.Array]) -> bool:
  """Whether arrays are equal bit for bit."""
  # All are started before the first one is waited for.
  equal = [_equal(_like(a, b), b) for a, b in zip(params, here, strict=True)]
  return all(map(bool, equal))


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
  bits = f"u{a.dtype.itemsize}"
  return (a.view(bits) == b.view(bits)).all()


def _read(numbers: Sequence[Any]) -> _Counts:
  step, calls, dropped, finished, *_ = numbers
  return _Counts(int(step), int(calls), int(dropped), bool(finished))


def _like(x: Any, other: Any) -> Any:
  """An array with the sharding of another."""
  return jax.device_put(x, other.sharding)


def _rounded(
  params: Sequence[Any], before: Sequence[Any], after: Sequence[Any]
) -> bool:
  """Whether parameters may be `before + (after - before)`."""
  for p, old, new in zip(params, before, after, strict=True):
    old, new = np.asarray(old), np.asarray(new)
    most = 2 * jnp.finfo(new.dtype).eps * np.maximum(abs(old), abs(new))
    most += jnp.finfo(new.dtype).tiny  # XLA may flush what is smaller.
    if not np.all(abs(np.asarray(p) - new) <= most):
      return False
  return True


def _on_host(tree: Any) -> Any:
  """Copies of arrays in the host's memory, where no program of a device waits."""
  cpu = jax.local_devices(backend="cpu")[0]
  return jax.tree.map(lambda x: jax.device_put(np.array(x), cpu), tree)


def _check_devices() -> None:
  """Refuses programs of several devices, which would wait for themselves.

  On CPUs, XLA runs the part of each device in a thread of a pool that has as many
  as there are cores. The first one waits in the callback, the others for the first
  one, and what the callback waits for needs one more thread of that pool.
  """
  devices = jax.local_device_count()
  if devices > 1:
    raise ValueError(
      f"This process has {devices} {jax.default_backend()} devices, and the update"
      " of the coordinator's transformation is traced: its callback could hang in"
      " a program of several devices. Compute the gradient under jit, and call"
      " update() outside of it; or give the process one device."
    )
