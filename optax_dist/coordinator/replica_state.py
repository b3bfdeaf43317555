"""What a replica holds, how it is read, and how it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist import quorum
from optax_dist.coordinator import (
  chief,
  data_plane,
  engine,
  errors,
  follower,
  journal,
  named_run,
  options,
  policies,
  specs,
  tree_checks,
)
from optax_dist.coordinator.fingerprint import fingerprint

# Seconds to wait for a thread's end.
_PATIENCE = 5.0


class ReplicaState:
  """The state of a replica, with what a training loop reads of it."""

  def __init__(
    self,
    engine_: engine.Engine,
    policy: policies.Policy,
    params: Any,
    *,
    replica: quorum.Replica,
    settings: options.Options,
    opt_state: Any = None,
    global_step: int = 0,
  ):
    engine_, settings = named_run.named(engine_, settings)
    self._engine, self._policy, self._settings = engine_, policy, settings
    params = jax.tree.map(jnp.asarray, params)
    tree_checks.check_params(params)
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
    self._spec = specs.spec(policy, shared, params, settings.wire)
    self._origin = (global_step, fingerprint(shared))
    self._compile(policy, shared)
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
    self._buffers: list[Any] = []
    self._saved = -1
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self._pinned: Any = shared
    self._based_on = global_step
    self._local: Any = policy.local(shared)
    self._rejoins = 0
    self._token_time = time.monotonic()
    self._computed = 0.0
    self._counts: dict[str, int] = {"applied": 0}
    self._left = False

  def _compile(self, policy: policies.Policy, shared: Any) -> None:
    """Has the update compiled now: in an attempt the others would wait."""
    nothing = bytes(self._plane.mean_place.nbytes)
    leaves = self._plane.read_inline(nothing)
    tree = jax.tree.unflatten(jax.tree.structure(self._template), leaves)
    jax.block_until_ready(policy.apply(shared, tree))

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
      replica=who.replica,
      step=who.step,
      state=self._origin[1] if who.step == self._origin[0] else "",
      line=who.line,
      open_journal=lambda: None if path is None else journal.Journal(path),
      failed=who.fail,
    )
    self._chiefs.append(new)
    new.start()

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

  def close(self) -> None:
    """Ends this replica's threads and waits; what it has not said is lost."""
    threads: list[follower.Follower | chief.Chief]
    threads = [self._follower, *self._chiefs]
    for thread in threads:
      thread.stop()
    self._engine.close()
    self._plane.close()
    for thread in threads:
      # One that is stuck in foreign code must not hold up who closes.
      if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_PATIENCE)

  def _wait(
    self, ready: Callable[[], bool], what: str | Callable[[], str]
  ) -> None:
    """Waits, with a deadline somewhat after the one that the chief keeps."""
    f = self._follower
    told = self._settings
    patience = told.timeout + 3 * told.chief_timeout + told.attempt_timeout
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
    text = what if isinstance(what, str) else what()
    raise errors.CoordinatorError(
      f"Replica {self.replica!r} has waited {patience:.1f} s {text}. "
      f"{missing or 'The chief says nothing'}."
    )

  def _raise_failure(self) -> None:
    if self._follower.failure is not None:
      raise self._follower.failure
