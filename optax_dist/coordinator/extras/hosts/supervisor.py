"""Decides about a host's replicas, together with the job's other hosts.

A pure state machine like the one it extends: a replica on this host alone is
decided about here, and one on several hosts by agreement with them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeAlias

from optax_dist.coordinator.extras.hosts import agreement
from optax_dist.coordinator.extras.hosts.nodes import Place
from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.launch.supervisor import (
  CannotStart,
  Effect,
  KillReplica,
  LauncherStops,
  ReplicaEnded,
  RunOver,
  Settled,
  StartedElsewhere,
  StartReplica,
  Tick,
)

_LONGEST_TAIL = 4096  # Characters sent to other hosts.

Input: TypeAlias = supervisor.Input | agreement.Heard | agreement.LauncherEnds


class HostSupervisor(supervisor.Supervisor):
  """The state machine; see the module docstring.

  Attributes:
    agreement: what the hosts have agreed on.
    trouble: why other hosts can't be read; "" while they can.
  """

  def __init__(
    self,
    host: int,
    places: Iterable[Place],
    policy: supervisor.Policy,
    agreed: agreement.Agreement,
    meeting_address: Callable[[], str],
  ):
    """Starts before any replica was started.

    Args:
      host: the index of this host.
      places: the replicas that this host has processes of.
      policy: what to do about those that end with an error.
      agreed: the agreement with the other hosts.
      meeting_address: finds an address of this host for the processes of a
        replica on several hosts.
    """
    places = list(places)
    shared = [p for p in places if len(p.hosts) > 1]
    followed = [p.replica for p in shared if p.hosts[0] != host]
    super().__init__([p.replica for p in places], policy, followed)
    self._host, self._meeting_address = host, meeting_address
    self._shared = {p.replica for p in shared}
    self._decided = self._shared.difference(followed)
    self._agreed: collections.deque[agreement.Effect] = collections.deque()
    self.agreement, self.trouble = agreed, ""

  def start(self, now: float) -> list[Effect]:
    """The first effects: start the replicas decided about here."""
    effects = self._route(super().start(now), now)
    return effects + self._execute_all_agreed(now)

  def step(self, given: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects."""
    effects: list[Effect] = []
    match given:
      case ReplicaEnded(replica) if replica in self._shared:
        words = given.words and (
          f"{given.process} on host {self._host} {given.words}"
        )
        tail = given.tail[-_LONGEST_TAIL:]
        self._agree(dataclasses.replace(given, words=words, tail=tail), now)
      case agreement.Heard() | agreement.LauncherEnds():
        self._agree(given, now)
      case RunOver() | LauncherStops() | Tick():
        effects += self._step_here(given, now)
        self._agree(given, now)
      case _:
        effects += self._step_here(given, now)
    return effects + self._execute_all_agreed(now)

  def _execute_all_agreed(self, now: float) -> list[Effect]:
    effects: list[Effect] = []
    while self._agreed:  # An effect may cause new ones, which come after it.
      effects += self._execute_agreed(self._agreed.popleft(), now)
    return effects

  def _agree(self, given: agreement.Input, now: float) -> None:
    self._agreed += self.agreement.step(given, now)

  def _step_here(self, given: supervisor.Input, now: float) -> list[Effect]:
    return self._route(super().step(given, now), now)

  def _route(self, decided: Iterable[Effect], now: float) -> list[Effect]:
    """Agrees on what concerns shared replicas; returns the rest."""
    effects: list[Effect] = []
    for effect in decided:
      match effect:
        case StartReplica(replica) if replica in self._shared:
          address = self._meeting_address()
          self._agree(dataclasses.replace(effect, address=address), now)
        case KillReplica(replica) if replica in self._shared:
          self._agree(effect, now)
        case Settled(replica) if replica in self._decided:
          self._agree(effect, now)
        case _:
          effects.append(effect)
    return effects

  def _execute_agreed(
    self, effect: agreement.Effect, now: float
  ) -> list[Effect]:
    match effect:
      case StartReplica(replica, restarts):
        return [
          effect,
          *self._step_here(StartedElsewhere(replica, restarts), now),
        ]
      case ReplicaEnded():
        words = f"ended, because {effect.words}"
        ended = dataclasses.replace(effect, words=words)
        return self._step_here(ended, now)
      case CannotStart(replica, words):
        words = f"{words}; {self.trouble}" if self.trouble else words
        return self._step_here(CannotStart(replica, words), now)
      case RunOver():
        return self._step_here(effect, now)
    return [effect]
