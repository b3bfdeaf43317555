"""Schedules of runs whose samples are leased; the faults are those of `faults`."""

from __future__ import annotations

import dataclasses
import random

from optax_dist import ledger
from tests.simulation import faults

run = faults.run


def schedule(seed: int, steps: int = 12) -> faults.Schedule:
  """The schedule of a seed."""
  return with_data(faults.schedule(seed, steps), seed)


def with_data(found: faults.Schedule, seed: int) -> faults.Schedule:
  """The same faults, where samples are leased."""
  r = random.Random(f"data of {seed}")
  setting = found.setting
  shared = setting.needed > setting.replicas
  batch = setting.needed * r.choice((1, 2))
  data = ledger.Batches(
    batch * r.choice((1, 3, 5)) + r.randrange(batch),
    batch,
    epochs=r.choice((1, 2, 3, None)),
    mode=r.choice(("exact", "exact", "streaming")),
  )
  halves = not shared and batch > setting.needed and r.random() < 0.5
  setting = dataclasses.replace(
    setting,
    data=data,
    starts=(),
    local_steps=2 if halves else 1,
    not_finite=r.choice((0.01, 0.01, 0.01, 0.4)),
  )
  return dataclasses.replace(found, setting=setting)
