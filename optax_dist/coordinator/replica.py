"""One replica of a run: what a training loop calls."""

from __future__ import annotations

import time
from typing import Any

import jax

from optax_dist.coordinator import (
  follower,
  phases,
  policies,
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
    self._wait(lambda: f.admitted, self._who_lets_in)
    self._refresh()
    return self

  def _who_lets_in(self) -> str:
    view, who = self._follower.view, "no chief"
    if view.chief is not None:
      who = f"not even {view.name(view.chief)}, the last known chief,"
    return (
      f"to be let in with the state of step {view.step}: {who} answers. If all"
      " replicas of the job have died, restart its service and resume from a"
      " checkpoint"
    )

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
    now = time.monotonic()
    self._computed += now - self._token_time
    self._token_time = now
    self._raise_failure()
    if self._left:
      self._count("finished", 1)
      return self._outcome("finished", finished=True)
    if self.finished:
      return self._start_over("finished", self._counted + 1)
    tree_checks.check_grads(grads, self._template)
    if f.rejoins != self._rejoins:
      # It was taken for dead meanwhile: what it had is worth nothing.
      return self._start_over("lost", self._counted + 1)
    self._mind_the_held()
    payload, self._local = self._policy.contribute(
      self._pinned, self._local, grads
    )
    if payload is None:
      return self._outcome("", accepted=True)
    self._batches.append(batch)
    if self.is_stale:
      return self._say_it_is_stale(self._computed)
    self._total = (
      payload if self._total is None else self._add(self._total, payload)
    )
    self._counted += 1
    self._unsent += 1
    if self._unsent < f.asked:
      return self._outcome("", accepted=True)
    return self._send()

  def _header(
    self, compute: float | None, finite: bool, count: int, total: int
  ) -> dict[str, Any]:
    self._sequence += 1
    return {
      "kind": "arrive",
      "local_step": self._based_on,
      "count": count,
      "total": total,
      "finite": finite,
      "applied": self._follower.step,
      "compute": compute,
      "batches": self._batches[-total:],
      "sequence": self._sequence,
      "ahead": 0,
    }

  def _say_it_is_stale(self, compute: float | None) -> Outcome:
    """Its fate is known; the chief need only know of it."""
    count = self._unsent + 1
    self._follower.tell(self._header(compute, True, count, count))
    return self._start_over("stale", self._counted + 1)

  def _send(self) -> Outcome:
    f = self._follower
    buffer, finite = self._plane.write(jax.tree.leaves(self._total))
    self._buffers.append(buffer)
    raw = buffer.tobytes() if self._inline and finite else b""
    header = self._header(self._computed, finite, self._unsent, self._counted)
    start = time.monotonic()
    try:
      f.arrive(
        follower.Arrival(header, raw, None if self._inline else buffer),
        self._rejoins,
      )
      phases.reach("arrived", self.replica)
      f.exchange_ahead()
      self._wait(lambda: f.fate is not None, "for this step's commit")
      assert f.fate is not None
      fate = f.fate
    except BaseException:
      self._settle_buffers(applied=False)
      raise
    waited = time.monotonic() - start
    if fate.reason == "more":
      # It is in, and its sum will be sent again with what is asked for now.
      self._unsent = 0
      self._token_time = time.monotonic()
      return self._outcome("", accepted=True, waited=waited)
    self._settle_buffers(fate.reason is None)
    if fate.reason is not None:
      self._mind_the_held(fate.reason)
      return self._start_over(fate.reason, self._counted, waited)
    self._count("applied", self._counted)
    before = fate.before
    self._clear()
    self._await_state()
    self._take_current()
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
      save=self._time_to_save(),
      waited=waited,
    )

  def _mind_the_held(self, rest: str = "superseded") -> None:
    """Where more was asked for, what was in may have had its fate meanwhile.

    Args:
      rest: what becomes of the gradients that were added since.
    """
    fate = self._follower.take_held_fate()
    if fate is None:
      return
    sent = self._counted - self._unsent
    self._count("applied" if fate.reason is None else fate.reason, sent)
    # A sum can't be taken apart again.
    self._count(rest, self._unsent)
    self._settle_buffers(fate.reason is None)
    self._clear()

  def _settle_buffers(self, applied: bool) -> None:
    """The latest was applied or not; nobody reads any of them any more."""
    for buffer in reversed(self._buffers):
      self._plane.settle(buffer, applied)
      applied = False
    self._buffers.clear()

  def _count(self, reason: str, gradients: int) -> None:
    if gradients:
      self._counts[reason] = self._counts.get(reason, 0) + gradients

  def abandon(self) -> Outcome:
    """Gives up the gradient that is being computed, and catches up.

    For a training step in micro-batches that finds `is_stale`: `params` are
    current afterwards, and the time for the rest of the work is saved.
    """
    self._raise_failure()
    if self.finished or self._left:
      return self._outcome("finished", finished=True)
    if self._follower.rejoins != self._rejoins:
      return self._start_over("lost", self._counted + 1)
    self._mind_the_held()
    if self.is_stale:
      self._batches.append(None)
      # How long it would have taken is not known.
      return self._say_it_is_stale(None)
    if not self._counted and self._follower.step > self._based_on:
      return self._start_over("abandoned")
    # What is summed already is still as good as it was.
    self._count("abandoned", 1)
    self._token_time = time.monotonic()
    return self._outcome("abandoned")

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
    self._follower.wish({"kind": "save", "after": self._based_on})

  def state_to_save(self) -> tuple[policies.SharedState, int]:
    """What to save now, and its step: after `Outcome.save`, that of all.

    A replica that was late may have passed the common step without stopping
    there; it has kept that step's state nonetheless.
    """
    f = self._follower
    with f.changed:
      if f.to_save is not None and f.to_save[1] == f.save_at == self._saved:
        return f.to_save
    return self._pinned, self._based_on

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

  def _take_current(self) -> None:
    """Goes on from what is shared now."""
    f = self._follower
    with f.changed:
      self._pinned, self._based_on = f.shared, f.step
      self._rejoins = f.rejoins

  def _refresh(self) -> None:
    self._take_current()
    self._local = self._policy.local(self._pinned)
    self._token_time = time.monotonic()

  def _clear(self) -> None:
    self._total, self._counted, self._unsent = None, 0, 0
    self._computed = 0.0
    self._batches = []

  def _start_over(
    self, reason: str, gradients: int = 1, waited: float = 0.0
  ) -> Outcome:
    """What was computed is dropped; goes on from the current parameters."""
    self._count(reason, gradients)
    self._clear()
    if reason == "finished":
      self._wait(lambda: self.finished, "for the end of the run")
    self._await_state()
    before = self._pinned
    self._take_current()
    self._local = self._policy.settle(
      before, self._pinned, self._local, mine=False
    )
    self._token_time = time.monotonic()
    return self._outcome(reason, waited=waited, finished=reason == "finished")

  def _await_state(self) -> None:
    """Waits for a peer's state, if that is what it needs to go on."""
    f = self._follower
    if f.rejoins != self._rejoins or f.lacking:
      # On what it has now, every gradient would be stale.
      current = lambda: f.admitted and not f.lacking
      self._wait(current, "for the parameters of this step")

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
      save=self._time_to_save(),
      waited=waited,
    )

  def _time_to_save(self) -> bool:
    """Whether the common step to save at has been reached; said once."""
    at = self._follower.save_at
    due = at is not None and self._saved < at <= self._based_on
    if at is not None and due:
      self._saved = at
    return due
