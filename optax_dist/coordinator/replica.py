"""One replica of a run: what a training loop calls."""

from __future__ import annotations

import time
from typing import Any

import jax

from optax_dist.coordinator import (
  follower,
  phases,
  replica_state,
  tree_checks,
)
from optax_dist.coordinator.outcome import Outcome

__all__ = ["Outcome", "Replica"]


class Replica(replica_state.ReplicaState):
  """One replica of a run; made by `join` and `run_embedded`.

  The parameters stay as they are between two calls of `step`, though others'
  commits go on in the background.
  """

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
    if self._left:
      return self._outcome("finished", finished=True)
    if self.finished:
      return self._start_over("finished")
    tree_checks.check_grads(grads, self._template)
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

    Their parameters are then the same; here at once, elsewhere after `step`.

    Raises:
      CoordinatorError: it did not end within `timeout` seconds.
    """
    if not self.finished and not self._left:
      self._follower.wish({"kind": "end", "reason": reason})
      self._wait(lambda: self.finished, "for the end of the run")
    if not self._left:
      self._start_over("finished", self._counted)

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

  def __enter__(self) -> Replica:
    return self

  def __exit__(self, kind: type | None, *rest: object) -> None:
    try:
      if kind is None:
        self.leave()
    finally:
      self.close()

  # Helpers.

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
