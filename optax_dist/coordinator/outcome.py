"""The outcome of a training loop's step."""

from __future__ import annotations

from typing import NamedTuple

from optax_dist import quorum


class Outcome(NamedTuple):
  """The outcome of one call of `Replica.step`.

  Attributes:
    accepted: whether the gradient was part of a committed step. Also True for
      what has not been sent yet: with a strategy that trains locally, and while
      gradients are summed.
    reason: why it was dropped, a value of `quorum.Reason`; "" otherwise.
    global_step: committed steps that the current parameters include.
    members: the replicas whose gradients were averaged, in order; empty if
      nothing was committed.
    staleness: staleness of the gradient, in steps.
    finished: whether the run is over; further steps have no effect.
    save: the step that all replicas save now, and None otherwise: a slow
      replica may be past it, and has kept its state.
    waited: seconds spent waiting for the others.
    committed: the number of steps right after the one that took the gradient; 0
      if none did. `global_step` may be more: others' steps go on meanwhile.
  """

  accepted: bool
  reason: str
  global_step: int
  members: tuple[quorum.Replica, ...] = ()
  staleness: int = 0
  finished: bool = False
  save: int | None = None
  waited: float = 0.0
  committed: int = 0
