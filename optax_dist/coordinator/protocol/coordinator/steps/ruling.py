"""The state of the quorum's rules, and who follows what they decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from optax_dist import quorum
from optax_dist.coordinator.protocol.coordinator.steps.gradients import Arrival
from optax_dist.coordinator.protocol.entries import ReplicaId

#: Does what the rules have decided, about a gradient that has come if any.
Follow: TypeAlias = Callable[[Sequence[quorum.Decision], Arrival | None], None]


class Ruling:
  """The rules, at work.

  Attributes:
    state: their state.
  """

  def __init__(self, state: quorum.State, follow: Follow):
    """Starts from a state.

    Args:
      state: the state.
      follow: called with what follows from an event.
    """
    self.state, self._follow = state, follow

  @property
  def step(self) -> int:
    """The step that is taken next."""
    return self.state.step

  def apply(self, event: quorum.Event, arriving: Arrival | None = None) -> None:
    """Applies an event, and has what it decides done.

    Args:
      event: the event.
      arriving: the gradient that it is about, if it has just come.
    """
    self.state, decisions = quorum.step(self.state, event)
    self._follow(decisions, arriving)

  def know(self, *events: quorum.Event) -> None:
    """Applies what was decided before, by an earlier coordinator."""
    for event in events:
      self.state, _ = quorum.step(self.state, event)

  def count_from(self, replica: ReplicaId, step: int) -> None:
    """Gradients of a replica on this step count, though it has joined later."""
    known = self.state.replicas[replica]
    counts = {replica: known._replace(start=min(known.start, step))}
    replicas = self.state.replicas | counts
    self.state = dataclasses.replace(self.state, replicas=replicas)

  def begin_at(self, step: int) -> None:
    """Sets the step that is taken next."""
    self.state = dataclasses.replace(self.state, step=step)
