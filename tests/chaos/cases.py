"""The fault matrix, and outages that are longer than deadlines."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

# Those that `phases.reach` reports.
PHASES = (
  "joining",
  "computing",
  "arrived",
  "reduce_scatter",
  "gather",
  "done",
  "applied",
  "serving",
  "fetching_snapshot",
  "checkpointing",
  "ending",
)
FAULTS = ("kill", "stop", "delay", "disconnect", "corrupt")
WHO = ("replica", "coordinator")
OUTAGE = "outage"  # In place of a phase.
OUTAGES = ("pause-all", "stop-one", "cut-host")
# One in so many runs is an outage.
_OUTAGE_EVERY = 5
REPLICAS = 3

# Phases that only occur when a replica joins a running job.
_JOINING = ("joining", "serving", "fetching_snapshot")
# Phases that only occur with gradients too large to be sent inline.
_LARGE = ("reduce_scatter", "gather", "done")


@dataclasses.dataclass(frozen=True)
class Case:
  """One run of the matrix.

  Attributes:
    seed: the seed of the case.
    phase: the phase in which the fault is injected; or `OUTAGE`.
    fault: the kind of fault, or of outage.
    who: its target: the coordinator, or the replica that is in the phase.
    after: steps before the fault.
    seconds: length of a stop, delay or outage.
    inline: whether gradients are sent inline, in the messages.
    loopback: whether replicas listen on 127.0.0.1 by `bind`.
    max_staleness: the quorum's `max_staleness`.
    aggregate: gradients in a step.
    lowers: whether it takes fewer while replicas are lost.
    data: the mode in which samples are leased; "" for none.
    times: how often an outage comes, or the coordinator is killed in a row.
    at: the phase in which a replica must be when an outage begins; "" for any.
    healed: seconds between two cuts.
    replaced: whether a coordinator that is stopped is killed and started again.
    replicas: how many there are.
    processes: processes of each replica.
    process: the replica and rank of the process that must be in the phase; None
      for any.
    skip: how often it enters the phase before.
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
  aggregate: int
  lowers: bool
  data: Literal["", "exact", "streaming"]
  times: int = 1
  at: str = ""
  healed: float = 0.0
  replaced: bool = False
  replicas: int = REPLICAS
  processes: int = 1
  process: tuple[int, int] | None = None
  skip: int = 0

  @property
  def joins(self) -> bool:
    """Whether a replica must be replaced for the phase to occur."""
    return self.phase in _JOINING

  @property
  def ends(self) -> bool:
    """Whether all must have been told to finish for the phase to occur."""
    return self.phase == "ending"

  @property
  def keeps_all(self) -> bool:
    """Whether no live replica may be removed: a new coordinator has its log."""
    dies = self.fault == "kill" or (self.fault == "stop" and self.replaced)
    return dies and self.who == "coordinator"

  def __str__(self) -> str:
    process = "" if self.process is None else "/{}.{}".format(*self.process)
    return f"{self.phase}/{self.fault}/{self.who}{process}"


def case(seed: int) -> Case:
  """The case of a seed; every fifth one is an outage.

  Example:
    >>> case(3) == case(3)
    True
    >>> [str(case(seed)) for seed in (1, 14)]
    ['computing/kill/coordinator', 'outage/cut-host/replica']
  """
  index, rest = divmod(seed, _OUTAGE_EVERY)
  if rest == _OUTAGE_EVERY - 1:
    return _outage(seed, index)
  return _cell(seed, seed - index)


def _cell(seed: int, index: int) -> Case:
  """A cell of the matrix; 110 consecutive indices are all of it."""
  cells = len(PHASES) * len(FAULTS)
  rng = random.Random(index)
  index %= cells * len(WHO)
  phase = PHASES[index % len(PHASES)]
  large = phase in _LARGE
  after, seconds = rng.randint(2, 5), rng.choice((0.3, 1.0, 2.5))
  inline, loopback = not large and rng.random() < 0.5, rng.random() < 0.2
  max_staleness, everyone = rng.choice((0, 0, 1)), rng.random() < 0.4
  return Case(
    seed,
    phase,
    fault=FAULTS[index // len(PHASES) % len(FAULTS)],
    # The number of cells is odd, so the second half has the other targets.
    who=WHO[index % len(WHO)],
    after=after,
    seconds=seconds,
    inline=inline,
    loopback=loopback,
    max_staleness=max_staleness,
    aggregate=REPLICAS if everyone else REPLICAS - 1,
    lowers=everyone,
    data=rng.choice(("", "exact", "streaming")),
    times=rng.choice((1, 2)),
    replaced=rng.random() < 0.5,
  )


def _outage(seed: int, index: int) -> Case:
  """An outage: longer than what replicas and coordinator wait by default."""
  rng = random.Random(seed)
  fault = OUTAGES[index % len(OUTAGES)]
  after, times, shortest, longest = {
    # Deadlines follow what was observed, once there is enough of it.
    "pause-all": (60, 2, 7.0, 9.0),
    # Also before the first step, if no step can do without it.
    "stop-one": (rng.choice((0, 60)), 1, 17.0, 20.0),
    "cut-host": (0, 5, 12.0, 14.0),
  }[fault]
  return Case(
    seed,
    OUTAGE,
    fault,
    # It is a replica's host that is cut off, from the coordinator's too.
    who="replica" if fault == "cut-host" else rng.choice(WHO),
    after=after,
    seconds=rng.uniform(shortest, longest),
    # In the middle of an exchange.
    inline=False,
    at=rng.choice(_LARGE) if fault == "pause-all" else "",
    loopback=False,
    max_staleness=rng.choice((0, 0, 1)),
    # With more gradients than replicas, each gives several.
    aggregate=rng.choice((REPLICAS, 2 * REPLICAS)),
    lowers=fault != "stop-one" or after > 0,
    data=rng.choice(("", "exact", "streaming")),
    times=times,
    healed=rng.choice((4.0, 16.0)),
  )


def kill(seed: int, processes: int) -> Case:
  """The case of a seed with replicas of several processes: one is killed.

  Or the coordinator is, while that process is in the phase. Consecutive seeds go
  through all phases of all processes; `kills` is how many there are.

  Example:
    >>> str(kill(7, processes=2)), kills(processes=2)
    ('computing/kill/coordinator/0.1', 68)
  """
  cells = _kills(processes)
  phase, process, who = cells[seed % len(cells)]
  once = phase in (*_JOINING, "checkpointing")
  return Case(
    seed,
    phase,
    "kill",
    who,
    after=1,
    seconds=0.0,
    inline=True,
    loopback=False,
    max_staleness=0,
    aggregate=2,
    lowers=True,
    data="",
    replicas=2,
    processes=processes,
    process=process,
    skip=0 if once else random.Random(seed).randrange(30),
  )


def kills(processes: int) -> int:
  """How many seeds `kill` has, until it begins again."""
  return len(_kills(processes))


def _kills(processes: int) -> list[tuple[str, tuple[int, int], str]]:
  return [
    (phase, (replica, rank), who)
    for phase in PHASES
    # With two replicas, the parameters are lost if one is killed while it serves
    # the other.
    if phase not in ("serving", "ending")
    for replica in range(2)
    # Process 0 joins for its replica.
    for rank in range(1 if phase == "joining" else processes)
    for who in WHO
  ]
