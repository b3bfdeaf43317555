"""The coordinator as an optax transformation, for trainers with their own loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from optax_dist._internal import checks
from optax_dist.coordinator import arguments, joining, memberships
from optax_dist.coordinator import options as settings
from optax_dist.coordinator.launch import channel
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import processes, threads, trees
from optax_dist.coordinator.strategies import strategy
from optax_dist.coordinator.training import preemption

_log = logging.getLogger("optax_dist.coordinator")

T = TypeVar("T")

# Seconds within which a program ends after an uncaught error.
_ENDS_WITHIN = 1.0
# Options of `join` that a trainer's own loop can't use, each with the reason.
_REFUSED = {
  "strategy": (
    "replicas that train locally have parameters of their own, which no step of"
    " the run names"
  ),
  "data": "samples are leased by Replica.batches(), and a trainer has its own",
  "progress": "samples are leased by Replica.batches(), and a trainer has its own",
  "probe": "it is for leased samples, and a trainer has its own",
  "max_skipped": "it is for leased samples, and a trainer has its own",
  "max_staleness": (
    "a trainer adds an update to its parameters, which reaches those of several"
    " steps later only within rounding"
  ),
  "staleness_weight": "only fresh gradients count",
  "opt_state": "it is in the state of the transformation",
  "inner_state": "no strategy that trains locally can be used",
  "global_step": "it is in the state of the transformation",
  "lineage": "it is of checkpoint.restore, and a trainer has its own checkpoints",
  "on_sigterm": "until_finished leaves on SIGTERM, and there is no Outcome to save at",
}


class CoordinatedState(NamedTuple):
  """The state of `CoordinatedOptimizer.tx`, all that a trainer's checkpoint needs.

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


class _Update(NamedTuple):
  """The last update.

  Attributes:
    state: the state after it.
    before: the parameters before it.
    after: the parameters after it.
  """

  state: Any
  before: Sequence[Any]
  after: Sequence[Any]


def as_optimizer(
  optimizer: optax.GradientTransformation,
  *,
  total_steps: int,
  **options: Any,
) -> CoordinatedOptimizer:
  """Puts the coordinator behind an optax transformation.

  For trainers that have their own loop and take an optimizer: the process is a
  replica of a run, whose steps apply `optimizer` to the mean gradient of k of N
  replicas. It joins at the first update, with the trainer's parameters, state
  and step.

  Args:
    optimizer: what each step applies to the mean gradient, weight decay and
      schedules included. Schedules follow the run's steps.
    total_steps: steps of the run, after which it ends for all replicas.
    **options: of `join`; with `optax-dist launch`, none are needed. Instead of
      `optax.MultiSteps` and a trainer's gradient accumulation, set
      `replicas_to_aggregate` to the number of gradients in a step: if it exceeds
      the number of replicas, each sums several.

  Raises:
    ValueError, TypeError: an option can't be used with a trainer's own loop.

  Example::

      k_of_n = coordinator.as_optimizer(optax.adamw(schedule), total_steps=400)
      optimizer = nnx.Optimizer(model, k_of_n.tx, wrt=nnx.Param)
      for batch in k_of_n.until_finished(batches):
        train_step(model, optimizer, batch)
  """
  # Arguments are checked here, since `join` is called later, perhaps in a callback.
  named = inspect.signature(joining.join).parameters
  for name, reason in _REFUSED.items():
    given, known = options.get(name), named.get(name)
    is_default = known is not None and given is known.default
    if given is not None and not is_default:
      raise ValueError(
        f"as_optimizer() can't use {name}={options[name]!r:.100}: {reason}. Leave it"
        " out, or write the loop yourself, with coordinator.join and Replica.step."
      )
  arguments.check(options)
  settings.of(
    "as_optimizer",
    {name: x for name, x in options.items() if name not in named},
  )
  if processes.of_this_program().count > 1:
    raise ValueError(
      "as_optimizer() is for replicas of one process, in which a trainer's callback is."
      " Write the loop yourself, with coordinator.join and Replica.step."
    )
  return CoordinatedOptimizer(
    optimizer, checks.count("total_steps", total_steps), options
  )


class CoordinatedOptimizer:
  """A replica behind an optax transformation; created by `as_optimizer`.

  Attributes:
    tx: the transformation to give to the trainer, as the last one of a chain.
    replica: this process's replica; None before the first update.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    total_steps: int,
    options: dict[str, Any],
  ):
    self.tx = optax.GradientTransformationExtraArgs(self._init, self._update)
    self.replica: Replica | None = None
    self._optimizer, self._options = optimizer, options
    self._initial = strategy.initialized_by(optimizer)
    self._total_steps = total_steps
    self._owner = memberships.Owner()
    # Under jit, JAX is called in this thread and not in the callback.
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "optax-dist-behind")
    self._lock = threading.Lock()
    self._preempted: preemption.Preemption | None = None
    self._failure: BaseException | None = None
    self._closed = self._final_params_seen = False
    # The structures of the parameters and of the optimizer's state.
    self._shapes: tuple[Any, Any] = None, None
    self._last: _Update | None = None

  # The training loop.

  @property
  def finished(self) -> bool:
    """Whether the run is over and the trainer has its last parameters."""
    return self._final_params_seen or self._closed

  @property
  def preempted(self) -> bool:
    """Whether SIGTERM has come, inside `until_finished`; see `Replica.preempted`."""
    return self._preempted is not None and self._preempted.look()

  def until_finished(self, batches: Iterable[T]) -> Iterator[T]:
    """Yields batches until the run is over, then closes the replica.

    The replica leaves the run if the batches or the trainer end earlier, and on
    SIGTERM, after its step. It is lost if one of them raises an error. After the
    run's last step there is at least one more batch: its update verifies that the
    trainer has the last parameters.

    Yields:
      The batches.

    Raises:
      The error that ended this replica's part in the run; under jit, the trainer
        would see it as one of XLA's.
    """
    left = iter(batches)
    with self._leaving_on_sigterm() as preempted:
      while self._failure is None and not (self.finished or preempted.look()):
        # A loop that starts the next step while the callback of the last one waits
        # takes the thread of XLA's that the callback needs.
        jax.effects_barrier()
        try:
          batch = next(left)
        except StopIteration:
          self._warn_if_early()
          break
        yield batch
    if self._failure is not None:
      raise self._failure

  def _warn_if_early(self) -> None:
    step = 0 if self.replica is None else self.replica.global_step
    if step < self._total_steps:
      _log.warning(
        "There are no more batches at step %d of %d, so this replica leaves the run."
        " Give until_finished batches without an end, such as itertools.cycle(...).",
        *(step, self._total_steps),
      )

  def close(self, error: BaseException | None = None) -> None:
    """Ends this replica's part; idempotent.

    Args:
      error: tells the others at once that the replica is lost; without one it
        leaves gracefully.
    """
    error = self._failure or error
    with self._lock:
      if self.replica is not None and not self._closed:
        self._closed = True
        self.replica.__exit__(
          None if error is None else type(error), error, None
        )
      self._closed = True
    self._worker.shutdown(wait=False)

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
      self.replica.heed(preempted)
    try:
      yield preempted
    except GeneratorExit:
      # The trainer has ended its loop, or has raised an error that ends the program.
      # In the second case the exit handlers report the error to the other replicas.
      if sys.is_finalizing():  # The program is ending.
        self.close()
      else:
        later = threading.Timer(_ENDS_WITHIN, self.close)
        later.daemon = True
        later.start()
      raise
    except BaseException as error:
      self.close(error)
      raise
    else:
      self.close()
    finally:
      preempted.remove()

  # The transformation.

  def _init(self, params: Any) -> CoordinatedState:
    _check_whole(params)
    # Each counter has a buffer of its own, since trainers donate the state.
    step, calls, dropped = (jnp.zeros((), jnp.int32) for _ in range(3))
    finished = jnp.zeros((), jnp.bool_)
    return CoordinatedState(
      step, calls, dropped, finished, self._initial(params)
    )

  def _update(
    self, grads: Any, state: CoordinatedState, params: Any = None, **extra: Any
  ) -> tuple[Any, CoordinatedState]:
    del extra  # A step is computed from the mean gradient alone.
    if params is None:
      raise ValueError(
        "The coordinator's transformation needs the parameters: call"
        " update(grads, state, params)."
      )
    _check_whole(params)
    leaves, shape = jax.tree.flatten(params)
    inner, inner_shape = jax.tree.flatten(state.inner)
    self._shapes = shape, inner_shape
    args = jax.tree.leaves(grads), leaves, state._replace(inner=inner)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
      _check_devices()
      shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args[1:]
      )
      after, new = io_callback(self._call_on_host, shapes, *args)
      updates = list(map(_move, leaves, after))
    else:
      after, new = self._call(*args)
      # With the shardings of the trainer's arrays, and as copies that it may donate.
      updates = [
        _move_on_device(p, _like(q, p))
        for p, q in zip(leaves, after, strict=True)
      ]
      new = jax.tree.map(lambda x, own: jnp.copy(_like(x, own)), new, args[2])
    new = new._replace(inner=jax.tree.unflatten(inner_shape, new.inner))
    return jax.tree.unflatten(shape, updates), new

  def _call_on_host(self, *args: Any) -> Any:
    """The callback under jit, which calls no JAX itself."""
    return jax.tree.map(np.asarray, self._call(*jax.tree.map(np.asarray, args)))

  # Lists of leaves, and a `CoordinatedState` whose numbers may be NumPy's.

  def _call(self, grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """The parameters to move to, and the state; calls JAX in the worker."""

    def work() -> tuple[Any, Any]:
      with self._lock:
        return self._advance(grads, params, state)

    if not (self._closed or self._failure is not None):
      running = self._worker.submit(threads.in_this_precision(work))
      try:
        return running.result()
      except BaseException as error:
        self._failure = error
        if running.done():
          # If the trainer catches the error, it takes no more steps.
          self.close()
        else:  # A signal has interrupted the trainer, such as Ctrl-C.
          for made in self._owner.made:
            made.end(f"it has raised {error!r:.200}", error)
    if self._failure is not None and self._preempted is None:
      raise self._failure
    # Inside `until_finished` an error is raised only when the trainer asks for a batch.
    calls = np.int32(int(state.calls) + 1)
    return params, state._replace(calls=calls, finished=np.bool_(True))

  def _join(self, params: Any, state: Any) -> Replica:
    """Joins the run with copies of the trainer's arrays, which it may donate."""
    shape, inner_shape = self._shapes
    with self._owner.joins():
      replica = joining.join(
        _reachable(self._optimizer, shape),
        list(map(_copy, params)),
        opt_state=inner_shape.unflatten(map(_copy, state.inner)),
        global_step=int(state.step),
        **self._options,
      )
    if self._preempted is not None:
      self._preempted.joined()
      replica.heed(self._preempted)
    return replica

  def _advance(self, grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Sends a gradient, unless it was computed on other parameters."""
    if self.replica is None:
      self.replica = self._join(params, state)
    replica = self.replica
    over = replica.finished or replica.global_step >= self._total_steps
    if over:
      replica.finish()  # Also if others have ended the run: gets the last parameters.
    here, before = jax.tree.leaves(replica.params), _dropped(replica)
    is_current = int(state.step) == replica.global_step and _same(params, here)
    self._check_use(params, state, is_current)
    if over:
      self._final_params_seen = is_current
    elif not is_current:
      replica.abandon()
    else:
      replica.step(grads)
      if replica.global_step >= self._total_steps:
        replica.finish()
    # Read first: if the run is over, this gets the last parameters.
    finished = replica.finished
    new = state._replace(
      step=np.int32(replica.global_step),
      calls=np.int32(int(state.calls) + 1),
      dropped=np.int32(int(state.dropped) + _dropped(replica) - before),
      finished=np.bool_(finished),
      inner=jax.tree.leaves(replica.opt_state),
    )
    after = jax.tree.leaves(replica.params)
    old = here if is_current else [np.array(x) for x in params]
    self._last = _Update(new, old, after)
    return after, new

  def _check_use(self, params: Any, state: Any, is_current: bool) -> None:
    """Refuses trainers that don't apply the updates as they are."""
    if self._last is None:
      return
    last = self._last.state
    if state.calls == last.calls - 1:
      raise ValueError(
        "The last update of the coordinator's transformation was discarded, and"
        " its gradient may be in a step: optax.MultiSteps, apply_if_finite or the"
        " trainer's gradient accumulation is around it. Leave that out, and use"
        " as_optimizer(..., replicas_to_aggregate=k) with more gradients in a step;"
        " gradients that are not finite are dropped by the coordinator."
      )
    if (state.step, state.calls) != (last.step, last.calls):
      return
    if is_current and not _same(
      *map(trees.leaves_of, (state.inner, last.inner))
    ):
      raise ValueError(
        "The optimizer's state was edited on this replica alone. For a"
        " hyperparameter of optax.inject_hyperparams call"
        " as_optimizer(...).replica.set_hyperparams(learning_rate=...), which sets"
        " it on all replicas."
      )
    if not is_current and not _rounded(
      params, self._last.before, self._last.after
    ):
      raise ValueError(
        "The parameters are not those that the last update of the coordinator's"
        " transformation leads to: something after it in the chain, or the"
        " trainer, changes updates or parameters. Make it the last one of the"
        " chain, and put what scales, decays or clips updates into the optimizer"
        " that as_optimizer() gets."
      )


def _check_whole(params: Any) -> None:
  """Refuses parameters of which another transformation has some."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)
  if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
    raise ValueError(
      "The coordinator's transformation gets some of the parameters, inside of"
      " optax.partition or optax.masked; the others would differ between replicas."
      " Put that inside: as_optimizer(optax.partition(...), ...), with"
      " optax.set_to_zero() for what is frozen."
    )


def _dropped(replica: Replica) -> int:
  """How many gradients of this replica are in no committed step."""
  outcomes = replica.stats()["gradients"]
  return sum(outcomes.values()) - outcomes["applied"]


def _move(p: Any, q: Any) -> Any:
  """The update that leads from p to q; equal numbers, -0.0 too, stay."""
  return jnp.where(p == q, jnp.asarray(-0.0, p.dtype), q - p)


_move_on_device = jax.jit(_move)


def _reachable(
  optimizer: optax.GradientTransformation, shape: Any
) -> optax.GradientTransformation:
  """Makes each step's parameters reachable from the ones before, bit for bit.

  XLA may compute `p + learning_rate * x` without rounding the product. Then no
  number leads from p to the result by an addition, which is all that trainers
  do. After this, one does, and it is `q - p`.

  Args:
    optimizer: for a tree of parameters.
    shape: the structure of that tree.

  Returns:
    The optimizer for a list of the tree's leaves.
  """
  tx = optax.with_extra_args_support(optimizer)

  def rounded_move(p: Any, q: Any) -> Any:
    # XLA may otherwise keep more digits of narrow numbers.
    kind = jnp.finfo(p.dtype)
    return jax.lax.reduce_precision(_move(p, q), kind.nexp, kind.nmant)

  def update(grads: Any, state: Any, leaves: Any = None) -> tuple[Any, Any]:
    params = shape.unflatten(leaves)
    updates, state = tx.update(shape.unflatten(grads), state, params)
    after = jax.tree.leaves(optax.apply_updates(params, updates))
    return list(map(rounded_move, leaves, after)), state

  init = lambda leaves: tx.init(shape.unflatten(leaves))
  return optax.GradientTransformation(init, update)


def _same(params: Sequence[Any], here: Sequence[jax.Array]) -> bool:
  """Whether arrays are equal bit for bit."""
  # All comparisons are started before the first result is waited for.
  equal = [_equal(_like(a, b), b) for a, b in zip(params, here, strict=True)]
  return all(map(bool, equal))


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
  bits = f"u{a.dtype.itemsize}"
  return (a.view(bits) == b.view(bits)).all()


def _like(x: Any, other: Any) -> Any:
  """An array with the sharding of another; a trainer's may be NumPy's."""
  return jax.device_put(x, getattr(other, "sharding", None))


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


def _copy(x: Any) -> jax.Array:
  """A copy where the array is; of NumPy's, in the host's memory."""
  if isinstance(x, jax.Array):
    return jnp.copy(x)
  # No program of a device waits there.
  return jax.device_put(x.copy(), jax.local_devices(backend="cpu")[0])


def _check_devices() -> None:
  """Refuses programs of several devices, which would wait for themselves.

  On CPUs, XLA runs each device's part in a thread of a pool with as many threads as
  cores. The first thread waits in the callback, and the others wait for the first one.
  The computation that the callback waits for needs one more thread of that pool.
  """
  devices = jax.local_device_count()
  if devices > 1:
    raise ValueError(
      f"This process has {devices} {jax.default_backend()} devices, and the update"
      " of the coordinator's transformation is traced: its callback could hang in"
      " a program of several devices. Compute the gradient under jit, and call"
      " update() outside of it; or give the process one device."
    )
