"""The fault matrix: which fault strikes whom, and in which phase of a step."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from optax_dist.coordinator.phases import PHASES

FAULTS = ("kill", "stop", "delay", "disconnect", "corrupt")
WHO = ("replica", "leader")

# Phases that are only reached when somebody joins a run that goes on.
_JOINING = ("joining", "serving", "fetching_snapshot")
# Phases of which the gradients must be too large to be sent inline.
_LARGE = ("reduce_scatter", "gather", "done")


@dataclasses.dataclass(frozen=True)
class Case:
  """One run of the matrix.

  Attributes:
    seed: it is made of.
    phase: when the fault strikes.
    fault: what happens.
    who: whom it strikes: the leader, or a replica that is not.
    after: steps before it strikes.
    seconds: of a stop or delay.
    inline: whether gradients are sent inline, in the messages.
    loopback: whether replicas listen at 127.0.0.1 by `bind`.
    max_staleness: of the quorum.
    everyone: whether all replicas that are there are needed for a step.
    data: in which mode samples are leased; "" for not at all.
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
    """Whether a replica has to be replaced for the phase to be reached."""
    return self.phase in _JOINING

  @property
  def remote(self) -> bool:
    """Whether another process than the one in the phase is struck."""
    if self.who == "leader":
      return self.joins
    return self.phase == "committing"

  def __str__(self) -> str:
    return f"{self.phase}/{self.fault}/{self.who}"


def case(seed: int) -> Case:
  """The case of a seed; 110 seeds in a row are the whole matrix.

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
  # There is an odd number of cells, so the second half has the others.
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
