"""The fault matrix: which fault hits which process in which phase."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from optax_dist.coordinator.phases import PHASES

FAULTS = ("kill", "stop", "delay", "disconnect", "corrupt")
WHO = ("replica", "leader")

# Phases that only occur when a replica joins a running job.
_JOINING = ("joining", "serving", "fetching_snapshot")
# Phases that only occur with gradients too large to be sent inline.
_LARGE = ("reduce_scatter", "gather", "done")


@dataclasses.dataclass(frozen=True)
class Case:
  """One run of the matrix.

  Attributes:
    seed: the seed of the case.
    phase: the phase in which the fault is injected.
    fault: the kind of fault.
    who: its target: the leader, or another replica.
    after: steps before the fault.
    seconds: length of a stop or delay.
    inline: whether gradients are sent inline, in the messages.
    loopback: whether replicas listen on 127.0.0.1 by `bind`.
    max_staleness: the quorum's `max_staleness`.
    everyone: whether every step needs all replicas.
    data: the mode in which samples are leased; "" for none.
  """

  seed: int
  phase: str
  fault: str
  who: str
  after: int
  seconds: float
  inline: bool
  loopback: bool
  max_staleness: int
  everyone: bool
  data: Literal["", "exact", "streaming"]

  @property
  def joins(self) -> bool:
    """Whether a replica must be replaced for the phase to occur."""
    return self.phase in _JOINING

  @property
  def remote(self) -> bool:
    """Whether the fault hits a process other than the one in the phase."""
    if self.who == "leader":
      return self.joins
    return self.phase == "committing"

  def __str__(self) -> str:
    return f"{self.phase}/{self.fault}/{self.who}"


def case(seed: int) -> Case:
  """The case of a seed; 110 consecutive seeds are the whole matrix.

  Example:
    >>> len({str(case(seed)) for seed in range(1000, 1110)})
    110
    >>> case(3) == case(3)
    True
  """
  cells = len(PHASES) * len(FAULTS)
  index = seed % (cells * len(WHO))
  phase = PHASES[index % len(PHASES)]
  fault = FAULTS[index // len(PHASES) % len(FAULTS)]
  # The number of cells is odd, so the second half has the other targets.
  who = WHO[index % len(WHO)]
  rng = random.Random(seed)
  large = phase in _LARGE
  return Case(
    seed,
    phase,
    fault,
    who,
    after=rng.randint(2, 5),
    seconds=rng.choice((0.3, 1.0, 2.5)),
    inline=not large and rng.random() < 0.5,
    loopback=rng.random() < 0.2,
    max_staleness=rng.choice((0, 0, 1)),
    everyone=rng.random() < 0.4,
    data=rng.choice(("", "exact", "streaming")),
  )
