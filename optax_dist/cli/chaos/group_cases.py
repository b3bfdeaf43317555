"""Which process of which replica is killed, in which phase of a step."""

from __future__ import annotations

import dataclasses
import random

from optax_dist.coordinator import phases

REPLICAS = 2
# All `phases` except serving: with two replicas, the parameters are lost if one
# is killed while it serves the other.
PHASES = tuple(phase for phase in phases.PHASES if phase != "serving")
# Phases of process 0 only, which represents its replica.
_SPEAKERS = ("committing", "joining")
# Phases that occur once after a start.
_AT_START = ("joining", "fetching_snapshot")


@dataclasses.dataclass(frozen=True)
class GroupCase:
  """One kill.

  Attributes:
    seed: the seed of the case.
    phase: the phase in which the process is killed.
    replica: its replica.
    rank: its index in the replica.
    time: at which occurrence of the phase it is killed.
  """

  seed: int
  phase: str
  replica: int
  rank: int
  time: int

  @property
  def at_start(self) -> bool:
    """Whether the phase only occurs at a start."""
    return self.phase in _AT_START

  @property
  def by_leader(self) -> bool:
    """Whether only the leader enters the phase."""
    return self.phase == "committing"

  @property
  def fault(self) -> str:
    """The kind of fault."""
    return "kill"

  @property
  def who(self) -> str:
    """The process, as in outputs: the indices of its replica and its own."""
    return f"{self.replica}.{self.rank}"

  def __str__(self) -> str:
    return f"{self.phase}/{self.fault}/{self.who}"


def cells(processes: int) -> list[tuple[str, int, int]]:
  """The whole matrix: phase, replica and process.

  Example:
    >>> len(cells(2))
    36
  """
  return [
    (phase, replica, rank)
    for phase in PHASES
    for replica in range(REPLICAS)
    for rank in range(1 if phase in _SPEAKERS else processes)
  ]


def case(seed: int, processes: int) -> GroupCase:
  """The case of a seed; consecutive seeds go through all cells.

  Example:
    >>> str(case(3, processes=2))
    'computing/kill/0.1'
  """
  every = cells(processes)
  phase, replica, rank = every[seed % len(every)]
  once = phase in (*_AT_START, "checkpointing")
  time = 1 if once else random.Random(seed).randint(1, 30)
  return GroupCase(seed, phase, replica, rank, time)
