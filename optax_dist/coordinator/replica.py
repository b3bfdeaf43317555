"""One replica of a run: what a training loop calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist import rules
from optax_dist.coordinator import (
  chief,
  data_plane,
  engine,
  errors,
  follower,
  journal,
  options,
  phases,
  policies,
)
from optax_dist.coordinator.fingerprint import fingerprint


class Outcome(NamedTuple):
  """What became of one call of `Replica.step`.

  Attributes:
    accepted: whether the gradient was part of a committed step. For a policy
      that trains locally, and while gradients are summed, True as well for
      what has not been sent yet.
    reason: why it was dropped, a value of `rules.Reason`; "" otherwise.
    global_step: committed steps, as of the parameters that are there now.
    members: the replicas whose gradients were averaged, in order; empty if
      nothing was committed.
    staleness: steps by which the gradient was late.
    finished: whether the run is over; further steps do nothing.
    save: whether this is the step after which all replicas save.
    waited: seconds spent waiting for the others.
  """

  accepted: bool
  reason: str
  global_step: int
  members: tuple[rules.Replica, ...] = ()
  staleness: int = 0
  finished: bool = False
  save: bool = False
  waited: float = 0.0


class Replica:
  """One replica of a run; made by `join` and `run_embedded`.

  The parameters stay as they are between two calls of `step`, though others'
  commits go on in the background.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    policy: policies.Policy,
    params: Any,
    *,
    replica: rules.Replica,
    settings: options.Options,
    opt_state: Any = None,
    global_step: int = 0,
  ):
    self._engine, self._policy, self._settings = engine_, policy, settings
    params = jax.tree.map(jnp.asarray, params)
    _check_params(params)
    shared = policy.shared(params)
    if opt_state is not None:
      shared = shared._replace(opt_state=opt_state)
    self._template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    )
    self._plane = data_plane.DataPlane(
      engine_.exchange,
      settings.secret,
      jax.tree.leaves(self._template),
      settings.wire,
    )
    self._inline = self._plane.place.nbytes <= settings.inline_bytes
    self._spec = policies.spec(policy, shared, params, settings.wire)
    self._origin = (global_step, fingerprint(shared))
    self._chiefs: list[chief.Chief] = []
    self.replica = replica
    self._follower = follower.Follower(
      engine_,
      settings,
      policy,
      replica,
      shared,
      self._plane,
      self._spec,
      global_step,
      self._take_chair,
    )
    self._sequence = 0
    self._total: Any = None
    self._counted = self._unsent = 0
    self._batches: list[Any] = []
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self._pinned: Any = shared
    self._based_on = global_step
    self._local: Any = policy.local(shared)
    self._rejoins = 0
    self._token_time = time.monotonic()
    self._counts: dict[str, int] = {"applied": 0}
    self._left = False

  def _take_chair(
    self, who: follower.Follower, term: int, position: int
  ) -> None:
    path = self._settings.journal
    new = chief.Chief(
      self._engine,
      self._settings,
      self._policy,
      self._plane,
      self._spec,
      who.view,
      term=term,
      position=position,
      incarnation=who.incarnation,
      step=who.step,
      state=self._origin[1] if who.step == self._origin[0] else "",
      open_journal=lambda: None if path is None else journal.Journal(path),
    )
    self._chiefs.append(new)
    new.start()

  def start(self) -> Replica:
    """Asks to be let in, and waits until it is.

    Raises:
      JoinRefused: the job differs in parameters, optimizer or policy.
      CoordinatorError: nobody answers within `timeout` seconds.
    """
    f = self._follower
    f.hello()
    f.start()
    self._wait(
      lambda: f.admitted,
      "to be let in: no chief answers. If all replicas of the job have died, "
      "restart its service and resume from a checkpoint",
    )
    self._refresh()
    return self

  # What a training loop reads.

  @property
  def params(self) -> Any:
    """The parameters to compute the next gradient on: a tree of arrays."""
    return self._policy.params(self._pinned, self._local)

  @property
  def center(self) -> Any:
    """What all replicas share, as of the last `step`."""
    return self._pinned.params

  @property
  def opt_state(self) -> Any:
    """The shared state of the optimizer, as of the last `step`."""
    return self._pinned.opt_state

  @property
  def global_step(self) -> int:
    """The committed steps that `params` has."""
    return self._based_on

  @property
  def is_stale(self) -> bool:
    """Whether a gradient on `params` would be dropped by now.

    A training step in micro-batches can ask between them, and `abandon`.
    """
    late = self._follower.step - self._based_on
    return late > self._policy.quorum.max_staleness

  @property
  def is_chief(self) -> bool:
    """Whether this process has the role of chief now."""
    return any(c.is_alive() for c in self._chiefs)

  @property
  def finished(self) -> bool:
    """Whether the run is over."""
    return self._follower.finished is not None

  def stats(self) -> dict[str, Any]:
    """Counts of this replica: gradients by fate, bytes moved, rejoins."""
    exchange = self._engine.exchange
    return {
      "gradients": dict(self._counts),
      "bytes_in": exchange.bytes_in,
      "bytes_out": exchange.bytes_out,
      "pending": exchange.pending(),
      "rejoins": self._follower.rejoins,
    }

  def fingerprint(self) -> str:
    """A digest of the shared state: equal on all replicas at equal steps."""
    return fingerprint(self._pinned)

  # What a training loop calls.

  def step(self, grads: Any, *, batch: Any = None) -> Outcome:
    """Sends a gradient computed on `params`, and waits for what becomes of it.

    Args:
      grads: a tree of arrays like the parameters.
      batch: a JSON value that tells the data of this gradient, for replay.

    Returns:
      The outcome; `params` are then current.

    Raises:
      ValueError: the gradient's structure, shapes or dtypes differ from the
        parameters'.
      CoordinatorError: the run can't go on; every replica raises the same.
    """
    f = self._follower
    phases.reach("computing", self.replica)
    compute = time.monotonic() - self._token_time
    self._raise_failure()
    if self.finished or self._left:
      return self._outcome("finished", finished=True)
    self._check(grads)
    if f.rejoins != self._rejoins:
      # It was taken for dead meanwhile: what it had is worth nothing.
      return self._start_over("lost")
    payload, self._local = self._policy.contribute(
      self._pinned, self._local, grads
    )
    if payload is None:
      self._token_time = time.monotonic()
      return self._outcome("", accepted=True)
    self._batches.append(batch)
    stale = self.is_stale
    if not stale:
      self._total = (
        payload if self._total is None else self._add(self._total, payload)
      )
      self._counted += 1
      self._unsent += 1
      if self._unsent < f.asked:
        return self._outcome("", accepted=True)
    return self._send(None if stale else self._total, compute)

  def _send(self, payload: Any, compute: float) -> Outcome:
    f = self._follower
    self._sequence += 1
    stale = payload is None
    count = max(1, self._unsent)
    finite, raw = True, b""
    buffer: Any = None
    if not stale:
      leaves = jax.tree.leaves(payload)
      buffer, finite = self._plane.write(leaves)
      if self._inline and finite:
        raw = buffer.tobytes()
    header = {
      "kind": "arrive",
      "local_step": self._based_on,
      "count": count,
      "total": max(1, self._counted),
      "finite": finite,
      "applied": f.step,
      "compute": compute,
      "batches": self._batches[-max(1, self._counted) :],
      "sequence": self._sequence,
    }
    start = time.monotonic()
    if stale:
      # Its fate is known; the chief need only know of it.
      f.tell(header)
      return self._start_over("stale", gradients=count + self._counted)
    f.arrive(follower.Arrival(header, raw, None if self._inline else buffer))
    phases.reach("arrived", self.replica)
    try:
      self._wait(lambda: f.fate is not None, "for this step's commit")
      assert f.fate is not None
      fate = f.fate
    finally:
      if buffer is not None:
        applied = f.fate is not None and f.fate.reason is None
        self._plane.settle(buffer, applied)
    waited = time.monotonic() - start
    if fate.reason == "more":
      # It is in, and its sum will be sent again with what is asked for now.
      self._unsent = 0
      self._token_time = time.monotonic()
      return self._outcome("", accepted=True, waited=waited)
    if fate.reason is not None:
      return self._start_over(fate.reason, self._counted, waited)
    self._counts["applied"] += self._counted
    before = fate.before
    self._clear()
    self._pinned, self._based_on = f.shared, f.step
    self._local = self._policy.settle(
      before, self._pinned, self._local, mine=True
    )
    self._token_time = time.monotonic()
    return Outcome(
      True,
      "",
      self._based_on,
      fate.members,
      fate.staleness,
      save=f.save_at == fate.step,
      waited=waited,
    )

  def abandon(self) -> Outcome:
    """Gives up the gradient that is being computed, and catches up.

    For a training step in micro-batches that finds `is_stale`: `params` are
    current afterwards, and the time for the rest of the work is saved.
    """
    self._raise_failure()
    if self.finished:
      return self._outcome("finished", finished=True)
    if self.is_stale:
      self._batches.append(None)
      return self._send(None, time.monotonic() - self._token_time)
    return self._start_over("abandoned", gradients=self._counted)

  def wait_until_stale(self, timeout: float) -> bool:
    """Waits until others have made the present work worthless, or the run ends.

    Returns:
      Whether that happened within `timeout` seconds.
    """
    f = self._follower
    with f.changed:
      return f.changed.wait_for(
        lambda: self.is_stale or self.finished or f.failure is not None, timeout
      )

  def save_soon(self) -> None:
    """Asks all replicas to save after the same step, told by `Outcome.save`.

    To be called when this process is told to stop (SIGTERM).
    """
    self._follower.tell({"kind": "save", "after": self._based_on})

  def finish(self, reason: str = "finished") -> None:
    """Ends the run in good order, for all replicas.

    Raises:
      CoordinatorError: it did not end within `timeout` seconds.
    """
    if not self.finished and not self._left:
      self._follower.wish({"kind": "end", "reason": reason})
      self._wait(lambda: self.finished, "for the end of the run")

  def leave(self) -> None:
    """Takes this replica out of the run in good order; the others go on.

    Raises:
      CoordinatorError: nobody took note within `timeout` seconds.
    """
    f = self._follower
    if self._left or self.finished:
      return
    f.wish({"kind": "leave", "reason": "left"})
    self._wait(lambda: f.gone or self.finished, "to be let go")
    self._left = True

  def close(self) -> None:
    """Ends this replica's threads and waits; what it has not said is lost."""
    self._follower.stop()
    for old in self._chiefs:
      old.stop()
    self._engine.close()
    self._plane.close()

  def __enter__(self) -> Replica:
    return self

  def __exit__(self, kind: type | None, *rest: object) -> None:
    try:
      if kind is None:
        self.leave()
    finally:
      self.close()

  # Helpers.

  def _wait(self, ready: Callable[[], bool], what: str) -> None:
    """Waits, with a deadline somewhat after the one that the chief keeps."""
    f = self._follower
    patience = self._settings.timeout + 3 * self._settings.chief_timeout
    done = lambda: ready() or f.failure is not None or self.finished
    with f.changed:
      f.changed.wait_for(done, patience)
      if ready():
        return
      missing = f.missing
    self._raise_failure()
    if self.finished:
      if not f.admitted:
        raise errors.RunFinished(
          f"The run has ended ({f.finished}) before replica "
          f"{self.replica!r} could take part."
        )
      with f.changed:
        f.fate = f.fate or follower.Fate("finished", f.step)
      return
    raise errors.CoordinatorError(
      f"Replica {self.replica!r} has waited {patience:.1f} s {what}. "
      f"{missing or 'The chief says nothing'}."
    )

  def _raise_failure(self) -> None:
    if self._follower.failure is not None:
      raise self._follower.failure

  def _check(self, grads: Any) -> None:
    have = jax.tree.structure(grads)
    want = jax.tree.structure(self._template)
    if have != want:  # type: ignore[operator]
      raise ValueError(
        f"grads must have the structure of the parameters, {want}, got {have}."
      )
    named = jax.tree_util.tree_leaves_with_path(self._template)
    for (path, like), grad in zip(named, jax.tree.leaves(grads), strict=True):
      if (grad.shape, grad.dtype) != (like.shape, like.dtype):
        raise ValueError(
          f"grads{jax.tree_util.keystr(path)} must be {like.dtype}"
          f"{list(like.shape)}, as the parameter, got "
          f"{grad.dtype}{list(grad.shape)}."
        )

  def _refresh(self) -> None:
    f = self._follower
    with f.changed:
      self._pinned, self._based_on = f.shared, f.step
      self._rejoins = f.rejoins
    self._local = self._policy.local(self._pinned)
    self._token_time = time.monotonic()

  def _clear(self) -> None:
    self._total, self._counted, self._unsent = None, 0, 0
    self._batches = []

  def _start_over(
    self, reason: str, gradients: int = 1, waited: float = 0.0
  ) -> Outcome:
    """What was computed is dropped; goes on from the current parameters."""
    f = self._follower
    if gradients:
      self._counts[reason] = self._counts.get(reason, 0) + gradients
    self._clear()
    if f.rejoins != self._rejoins:
      self._wait(lambda: f.admitted, "to be let in again")
    with f.changed:
      before, after = self._pinned, f.shared
      self._pinned, self._based_on = after, f.step
      self._rejoins = f.rejoins
    self._local = self._policy.settle(before, after, self._local, mine=False)
    self._token_time = time.monotonic()
    return self._outcome(reason, waited=waited, finished=reason == "finished")

  def _outcome(
    self,
    reason: str,
    accepted: bool = False,
    finished: bool = False,
    waited: float = 0.0,
  ) -> Outcome:
    f = self._follower
    save = f.save_at is not None and f.save_at == self._based_on
    return Outcome(
      accepted,
      reason,
      self._based_on,
      finished=finished,
      save=save,
      waited=waited,
    )


def _check_params(params: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(
        f"params{jax.tree_util.keystr(path)} must be of a floating dtype to "
        f"have a gradient, got {leaf.dtype}."
      )
  if not jax.tree.leaves(params):
    raise ValueError("params must have at least one array, got none.")
