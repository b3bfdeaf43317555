"""Schedules of runs whose samples are leased; the faults are those of `faults`."""

from __future__ import annotations

import dataclasses
import random

from optax_dist import ledger
from tests.simulation import faults

run = faults.run


def schedule(seed: int, steps: int = 12) -> faults.Schedule:
  """The schedule of a seed."""
  r = random.Random(f"data of {seed}")
  found = faults.schedule(seed, steps)
  setting = found.setting
  shared = setting.needed > setting.replicas
  batch = setting.needed * r.choice((1, 2))
  data = ledger.Batches(
    batch * r.choice((1, 3, 5)) + r.randrange(batch),
    batch,
    epochs=r.choice((1, 2, 3, None)),
    mode=r.choice(("exact", "exact", "streaming")),
  )
  exact = shared and r.random() < 0.5
  # Replicas that take turns have data of their own.
  late = 0 if setting.alone else setting.max_staleness
  setting = dataclasses.replace(
    setting, data=data, exact=exact, alone=False, max_staleness=late
  )
  return dataclasses.replace(found, setting=setting)
