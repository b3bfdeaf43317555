"""Decides about a host's replicas, together with the job's other hosts.

A pure state machine in front of a host's own supervisor: an `Agreement` says
when a replica on several hosts starts, and when it has ended.

    this host's processes -> Agreement -> ReplicaEnded ... -> Supervisor
                                 ^                                |
    other hosts' notices --------+---------- StartReplica --------+
"""

from __future__ import annotations

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
  StartReplica,
  State,
  Tick,
)

Input: TypeAlias = supervisor.Input | agreement.Heard | agreement.LauncherEnds


class HostSupervisor:
  """The state machine; see the module docstring.

  Attributes:
    agreement: what the hosts have agreed on.
    trouble: why other hosts can't be read; "" while they can.
  """

  def __init__(
    self,
    places: Iterable[Place],
    policy: supervisor.Policy,
    agreed: agreement.Agreement,
    meeting_address: Callable[[], str],
  ):
    """Starts before any replica was started.

    Args:
      places: the replicas that this host has processes of.
      policy: what to do about those that end with an error.
      agreed: the agreement with the other hosts.
      meeting_address: finds an address of this host for the processes of a
        replica on several hosts.
    """
    places = list(places)
    self._shared = {p.replica for p in places if len(p.hosts) > 1}
    self._own = supervisor.Supervisor([p.replica for p in places], policy)
    self._absent: set[int] = set()
    self._meeting_address = meeting_address
    self.agreement, self.trouble = agreed, ""

  @property
  def over(self) -> bool:
    """Whether the run has finished."""
    return self._own.over

  def start(self, now: float) -> list[Effect]:
    """The first effects: start all replicas."""
    return self._share(self._own.start(now), now)

  def step(self, given: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects."""
    effects: list[Effect] = []
    match given:
      case ReplicaEnded(replica) if replica in self._shared:
        return self._agree(given, now)
      case agreement.Heard() | agreement.LauncherEnds():
        return self._agree(given, now)
      case RunOver() | LauncherStops() | Tick():
        effects += self._decide(given, now)
        return effects + self._agree(given, now)
    return self._decide(given, now)

  def _decide(self, given: supervisor.Input, now: float) -> list[Effect]:
    """What this host's supervisor decides, as far as the others agree."""
    return self._share(self._own.step(given, now), now)

  def _share(self, decided: Iterable[Effect], now: float) -> list[Effect]:
    effects: list[Effect] = []
    for effect in decided:
      match effect:
        case StartReplica(replica) if replica in self._shared:
          address = self._meeting_address()
          wanted = dataclasses.replace(effect, address=address)
          effects += self._agree(wanted, now)
        case KillReplica(replica) if replica in self._shared:
          effects += [effect, *self._agree(effect, now)]
        case _:
          effects.append(effect)
    for replica in self._shared - self._absent:
      if self._own.state(replica) is State.ABSENT:
        self._absent.add(replica)
        words = "it was abandoned"
        effects += self._agree(CannotStart(replica, words), now)
    return effects

  def _agree(self, given: agreement.Input, now: float) -> list[Effect]:
    effects: list[Effect] = []
    for effect in self.agreement.step(given, now):
      match effect:
        case ReplicaEnded() | RunOver():
          effects += self._decide(effect, now)
        case CannotStart(replica, words):
          self._absent.add(replica)
          words = f"{words}; {self.trouble}" if self.trouble else words
          effects += self._decide(CannotStart(replica, words), now)
        case _:
          effects.append(effect)
    return effects
