"""What happens to a run, by its seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from optax_dist import ledger
from tests.churn import models

# Committed steps of each run, and how many epochs they are in exact mode.
STEPS, EPOCHS = 16, 4
MOST_REPLICAS = 5
# When a process is killed or stopped; "" is at once.
_PHASES = ("computing", "computing", "arrived", "applied", "")
_EXCHANGES = ("reduce_scatter", "gather", "done")

Kind = Literal[
  "kill",
  "kill-coordinator",
  "cut-power",
  "stop",
  "join",
  "leave",
  "kill-all",
  "lose-coordinator",
]


@dataclasses.dataclass(frozen=True)
class Setting:
  """What the parameters after a step may depend on.

  Attributes:
    model: one of `models.MODELS`.
    width: of the transformer.
    dtype: of the parameters.
    wire: how gradients are sent.
    mode: of the epochs.
    slots: micro-batches in a step.
  """

  model: str
  width: int
  dtype: str
  wire: str
  mode: Literal["exact", "streaming"]
  slots: int

  @property
  def data(self) -> ledger.Batches:
    """The data of the run; some samples are left over in each epoch."""
    batch = self.slots * models.MICRO_BATCH
    return ledger.Batches(
      STEPS // EPOCHS * batch + 3,
      batch,
      seed=7,
      epochs=EPOCHS,
      mode=self.mode,
      micro_batch=models.MICRO_BATCH,
      deterministic=True,
    )


@dataclasses.dataclass(frozen=True)
class Event:
  """What happens once all replicas are about to compute a step.

  Attributes:
    step: the step.
    kind: what happens.
    phase: when the process is killed or stopped: in this phase; "" at once.
    after: how often it enters the phase before.
    seconds: how long it is stopped.
    replicas: how many go on from a checkpoint, after the end of all.
    lost: bytes of the coordinator's log that were not on the disk yet.
  """

  step: int
  kind: Kind
  phase: str = ""
  after: int = 0
  seconds: float = 0.0
  replicas: int = 0
  lost: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run.

  Attributes:
    seed: its seed.
    setting: what the result may depend on.
    inline: whether gradients are sent in messages.
    replicas: how many there are at first.
    events: in order.
  """

  seed: int
  setting: Setting
  inline: bool
  replicas: int
  events: tuple[Event, ...]

  def __str__(self) -> str:
    one = self.setting
    kinds = " ".join(f"{e.kind}@{e.step}" for e in self.events)
    return (
      f"{one.model} {one.dtype}, wire {one.wire}, {one.mode}, {one.slots} slots,"
      f" {'inline' if self.inline else 'exchanged'}, N={self.replicas} {kinds}"
    )


def plan(seed: int, width: int | None = None) -> Plan:
  """The plan of a seed.

  Args:
    seed: the seed.
    width: of the transformer; None: a small one, or digits.

  Example:
    >>> plan(3) == plan(3)
    True
  """
  rng = random.Random(seed)
  setting = Setting(
    rng.choice(models.MODELS if width is None else ("transformer",)),
    models.WIDTH if width is None else width,
    *rng.choice(
      (
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
      )
    ),
    mode=rng.choice(("exact", "streaming")),
    slots=rng.choice((5, 8, 12)),
  )
  inline = rng.random() < 0.4
  replicas = live = rng.randint(1, MOST_REPLICAS)
  events: list[Event] = []
  for step in sorted(rng.sample(range(1, STEPS - 1), rng.randint(4, 7))):
    # The end of all takes long, for all processes are started again.
    ended = any(event.replicas for event in events)
    event = _event(rng, step, live, inline, ended)
    live += {"join": 1, "leave": -1, "kill": -1}.get(event.kind, 0)
    live = event.replicas or live
    events.append(event)
  return Plan(seed, setting, inline, replicas, tuple(events))


def _event(
  rng: random.Random, step: int, live: int, inline: bool, ended: bool
) -> Event:
  kinds: list[Kind] = ["stop", *["kill-coordinator"] * 3, "cut-power"]
  if not ended:
    kinds += ["kill-all", "lose-coordinator"]
  if live < MOST_REPLICAS:
    kinds += ["join"] * 4
  if live > 1:
    kinds += ["kill", "kill", "kill", "leave"]
  kind = rng.choice(kinds)
  phases = _PHASES if inline else (*_PHASES, *_EXCHANGES)
  return Event(
    step,
    kind,
    phase=rng.choice(phases),
    after=rng.randrange(4),
    seconds=rng.uniform(0.1, 3.0),
    replicas=rng.randint(1, MOST_REPLICAS)
    if kind in ("kill-all", "lose-coordinator")
    else 0,
    lost=rng.choice((1, 100, 1000, 5000)) if kind == "cut-power" else 0,
  )
